"""Follows a job of a Ray cluster: its log, line by line, and at the end its exit code."""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import aiohttp
from ray.job_submission import JobStatus, JobSubmissionClient

from cluster.log_view import LogView

LOST_CONTACT = 3
"""Exit code when the job server stayed away for `_CONTACT_S`, `--limit-s` is over, or after Ctrl-C. The job
goes on."""

_CONTACT_S = 60.0
_END = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}


@dataclass(frozen=True, slots=True)
class Commands:
    """What a person types to go on with a job.

    Attributes:
        resume: submits the same again; empty if what was submitted is not known.
        attach: follows it again, from another terminal too.
        stop: ends it.
    """

    resume: str
    attach: str
    stop: str


class JobFollower:
    """Shows the log of one job until it ends.

    Attributes:
        job: submission id.
        show: called with every line of the log; prints it unless somebody else takes it.
    """

    def __init__(self, client: JobSubmissionClient, job: str, commands: Commands) -> None:
        self.job = job
        self.show: Callable[[str], None] = LogView(sys.stdout)
        self._client = client
        self._commands = commands
        self._num_seen = 0
        self._begun_line = ""

    def follow(self, limit_s: float | None = None) -> int:
        """Returns the job's exit code; `LOST_CONTACT` if it was still running when the wait ended."""
        status = self._wait(limit_s)
        if status is None:
            return LOST_CONTACT
        code = self._exit_code(status)
        _say(f"job {self.job} {status.lower()}, exit code {code}")
        if code and self._commands.resume:
            _say(f"to continue this run from its newest saves: {self._commands.resume}")
        return code

    def stop(self, limit_s: float | None = None) -> int:
        """Asks the job to end and follows it until it has: a run saves what moved first.

        Returns:
            0 if the job has ended, `LOST_CONTACT` if that was not seen.
        """
        if not self._client.stop_job(self.job):
            _say(f"job {self.job} was not running")
            return 0
        _say(f"job {self.job} is asked to end")
        status = self._wait(limit_s)
        if status is None:
            return LOST_CONTACT
        _say(f"job {self.job} {status.lower()}")
        return 0

    def _wait(self, limit_s: float | None) -> JobStatus | None:
        """None if the job goes on."""
        try:
            status = asyncio.run(self._until_end(limit_s))
        except KeyboardInterrupt:
            status = None
        self._take("\n" if self._begun_line else "")
        if isinstance(self.show, LogView):
            self.show.end()
        if status is None:
            _say(f"job {self.job} goes on; to follow it: {self._commands.attach}")
            _say(f"to end it: {self._commands.stop}")
        return status

    async def _until_end(self, limit_s: float | None) -> JobStatus | None:
        deadline = time.monotonic() + limit_s if limit_s else float("inf")
        heard_s = time.monotonic()
        while True:
            try:
                await self._follow_log(deadline)
                status = await asyncio.to_thread(self._client.get_job_status, self.job)
                heard_s = time.monotonic()
                if status in _END:
                    return status
            except (RuntimeError, ConnectionError, aiohttp.ClientError) as error:
                if time.monotonic() - heard_s > _CONTACT_S:
                    _say(f"no contact with the cluster for {_CONTACT_S:g} s: {error}")
                    return None
            if time.monotonic() > deadline:
                _say(f"the limit of {limit_s:g} s is over")
                return None
            await asyncio.sleep(1)

    async def _follow_log(self, deadline: float) -> None:
        """Takes what is new until the log ends; each connection starts at its first line."""
        skip = self._num_seen
        stream: AsyncIterator[str] = self._client.tail_job_logs(self.job)
        while True:
            left_s = min(deadline - time.monotonic(), 24 * 3600)
            try:
                text = await asyncio.wait_for(anext(stream), timeout=max(left_s, 0.01))
            except (StopAsyncIteration, TimeoutError):
                return
            new, skip = text[skip:], max(0, skip - len(text))
            self._num_seen += len(new)
            self._take(new)

    def _take(self, text: str) -> None:
        *lines, self._begun_line = (self._begun_line + text).split("\n")
        for line in lines:
            self.show(line)

    def _exit_code(self, status: JobStatus) -> int:
        if status == JobStatus.SUCCEEDED:
            return 0
        details = self._client.get_job_info(self.job)
        if details.driver_exit_code is None and details.message:
            _say(details.message)
        return details.driver_exit_code or 1


def _say(text: str) -> None:
    print(text, flush=True)  # noqa: T201 - what a person who follows a job reads
