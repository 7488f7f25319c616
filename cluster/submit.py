"""Submits a job to a Ray cluster, follows its log and returns its exit code.

    python -m cluster.submit train --config tiny --run-name first
    python -m cluster.submit ettr --costs paper --out ettr

The cluster is RAY_ADDRESS or `--address` (`http://host:8265` or `host:6379`); with token authentication set
RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH. The working folder is uploaded, without what `EXCLUDED` names.
"""

import argparse
import asyncio
import logging
import os
import shlex
import sys
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from layercheck.errors import ConfigError, LayerCheckError

ENTRY = {"train": "app", "ettr": "simulations.ettr", "measure": "simulations.measure"}
EXCLUDED = [
    ".venv",
    "runs",
    ".git",
    "**/__pycache__",
    ".mypy_cache",
    ".ruff_cache",
    ".pytest_cache",
    "*.egg-info",
]
PATHS = ("--out", "--costs", "--trace")
"""Arguments of the simulation and the measurements that name files."""
LOST_CONTACT = 3
"""Exit code when the job server stayed away for `_CONTACT_S`, or `--limit-s` is over. The job goes on."""

_CONTACT_S = 60.0
_END = {JobStatus.SUCCEEDED, JobStatus.FAILED, JobStatus.STOPPED}


class SubmitError(LayerCheckError):
    """The cluster cannot be reached or refuses the job."""


def submit(
    address: str | None, kind: str, args: list[str], env: dict[str, str] | None = None
) -> "JobFollower":
    """Submits one job and returns what follows it.

    Args:
        address: of the cluster; None for RAY_ADDRESS.
        kind: a key of `ENTRY`.
        args: of the program; local paths are made absolute, since the job runs in another folder.
        env: more variables for the job.

    Raises:
        SubmitError: nobody answers at the address, or the job is refused.
        ConfigError: no address is known.
    """
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        raise ConfigError("no cluster: set RAY_ADDRESS or pass --address http://host:8265")
    program = with_absolute_storage(args) if kind == "train" else with_absolute_paths(args)
    runtime_env: dict[str, Any] = {"working_dir": str(Path.cwd()), "excludes": EXCLUDED}
    if env:
        runtime_env["env_vars"] = env
    try:
        client = _client(address)
        job = client.submit_job(
            entrypoint=shlex.join(["python", "-m", ENTRY[kind], *program]), runtime_env=runtime_env
        )
    except (ConnectionError, RuntimeError, RayError) as error:
        raise SubmitError(f"cannot submit to {address}: {error}", address=address) from error
    return JobFollower(client, job, resume=shlex.join(["python", "-m", "cluster.submit", kind, *args]))


def _client(address: str) -> JobSubmissionClient:
    # Ray lets these variables override the address that it is given: a job for a private cluster would land
    # on whatever cluster the shell happens to name.
    hidden = {name: os.environ.pop(name, None) for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")}
    # It lists every ignored file of the upload.
    logging.getLogger("ray").setLevel(logging.ERROR)
    try:
        return JobSubmissionClient(address)
    finally:
        os.environ.update({name: value for name, value in hidden.items() if value is not None})


class JobFollower:
    """Shows the log of one job, line by line, until it ends.

    Attributes:
        job: submission id.
        show: called with every line of the log; prints it unless somebody else takes it.
    """

    def __init__(self, client: JobSubmissionClient, job: str, resume: str) -> None:
        self.job = job
        self.show: Callable[[str], None] = _print_line
        self._client = client
        self._resume = resume
        self._num_seen = 0
        self._begun_line = ""

    def follow(self, limit_s: float | None = None) -> int:
        """Returns the job's exit code; `LOST_CONTACT` if it was still running when the wait ended."""
        print(f"job {self.job} submitted", flush=True)
        try:
            status = asyncio.run(self._until_end(limit_s))
        except KeyboardInterrupt:
            status = None
        self._take("\n" if self._begun_line else "")
        if status is None:
            print(f"job {self.job} goes on; ray job logs -f {self.job}, ray job stop {self.job}", flush=True)
            return LOST_CONTACT
        code = self._exit_code(status)
        print(f"job {self.job} {status.lower()}, exit code {code}", flush=True)
        if code:
            print(f"to continue this run from its newest saves: {self._resume}", flush=True)
        return code

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
                    print(f"no contact with the cluster for {_CONTACT_S:g} s: {error}", flush=True)
                    return None
            if time.monotonic() > deadline:
                print(f"the limit of {limit_s:g} s is over", flush=True)
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
            print(details.message, flush=True)
        return details.driver_exit_code or 1


def _print_line(line: str) -> None:
    print(line, flush=True)


def with_absolute_storage(args: list[str]) -> list[str]:
    """Adds or rewrites `--storage` so that it means the same folder wherever the job runs."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    known.add_argument("--storage")
    known.add_argument("--config")
    known.add_argument("--set", action="append", default=[])
    found, _ = known.parse_known_args(args)
    if found.storage is None and any(item.startswith("run.storage=") for item in found.set):
        raise ConfigError("pass the storage as --storage, not by --set run.storage=...")
    storage = found.storage or _configured_storage(found.config)
    if "://" in storage:
        return args
    return [*_without(args, "--storage"), "--storage", str(Path(storage).expanduser().absolute())]


def with_absolute_paths(args: list[str]) -> list[str]:
    """Rewrites the values of `PATHS` that are local: the job runs in a folder that is gone after it."""
    result = list(args)
    for place, arg in enumerate(result):
        flag, is_joined, value = arg.partition("=")
        if flag not in PATHS:
            continue
        if is_joined:
            result[place] = f"{flag}={_absolute(flag, value)}"
        elif place + 1 < len(result):
            result[place + 1] = _absolute(flag, result[place + 1])
    return result


def _absolute(flag: str, value: str) -> str:
    """A folder to write to need not exist yet; costs may also be a name, and a store a URI."""
    path = Path(value).expanduser()
    return str(path.absolute()) if flag == "--out" or path.exists() else value


def _configured_storage(config: str | None) -> str:
    if config is None:
        return "runs"
    path = Path(config) if config.endswith((".yaml", ".yml")) else Path("app/configs") / f"{config}.yaml"
    settings = yaml.safe_load(path.read_text()) if path.is_file() else None
    run = settings.get("run") if isinstance(settings, dict) else None
    return str(run.get("storage", "runs")) if isinstance(run, dict) else "runs"


def _without(args: list[str], flag: str) -> list[str]:
    kept, skip = [], False
    for arg in args:
        if not skip and arg != flag and not arg.startswith(f"{flag}="):
            kept.append(arg)
        skip = arg == flag and not skip
    return kept


def main(argv: list[str] | None = None) -> int:
    """The command line; everything after the kind that is not ours goes to the program."""
    parser = argparse.ArgumentParser(prog="python -m cluster.submit", description=__doc__, allow_abbrev=False)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("kind", choices=sorted(ENTRY))
    parser.add_argument("--address", help="default: RAY_ADDRESS")
    parser.add_argument("--limit-s", type=float, help="stop following after this long; the job goes on")
    ours, program_args = parser.parse_known_args(argv)
    try:
        return submit(ours.address, ours.kind, program_args).follow(ours.limit_s)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
