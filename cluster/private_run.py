"""A run of the app on a private head of its own, from outside: start, follow, find the workers, end."""

import os
import subprocess
import sys
from pathlib import Path

from cluster.head import PrivateHead, start_head

NUM_CPUS = 6
"""Offered by the head: the workers of a submission that dies and those of the next may overlap."""


class PrivateRun:
    """Starts the run and starts it again. Everything lies below `folder`.

    Args:
        folder: for the storage and the log; made if missing.
        name: of the run.
        config: a name in `app/configs/`, or a YAML file.
        settings: `--set` items beyond that file.
        head: of somebody else, who ends it; None: one of its own.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        config: str,
        settings: tuple[str, ...] = (),
        head: PrivateHead | None = None,
    ) -> None:
        self.folder = folder
        self.name = name
        self.storage = folder / "storage"
        self.store = self.storage / name / "layercheck"
        self.log = folder / "run.log"
        self.num_submissions = 0
        folder.mkdir(parents=True, exist_ok=True)
        self._config, self._settings = config, settings
        self._head, self._has_own_head = head, head is None
        self._driver: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Makes sure that a head and a driver live; a driver that is gone is submitted again."""
        if self._head is None:
            self._head = start_head(num_cpus=NUM_CPUS)
        if self._driver is None:
            self._driver = self._submit(self._head)

    def _submit(self, head: PrivateHead) -> subprocess.Popen[bytes]:
        self.num_submissions += 1
        command = [sys.executable, "-m", "app", "--config", self._config, "--run-name", self.name]
        command += ["--storage", str(self.storage)]
        # As a person does who knows that the last submission is dead; else it would be watched first.
        command += ["--takeover"] if self.num_submissions > 1 else []
        command += ["--set", *self._settings] if self._settings else []
        with open(self.log, "ab") as log:
            return subprocess.Popen(
                command,
                env={**os.environ, **head.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def stop(self) -> None:
        """Ends everything that belongs to the run; of a head of somebody else, the driver alone."""
        self.end_submission()
        if self._head is not None and self._has_own_head:
            self._head.kill()
            self._head = None

    def end_submission(self) -> bool:
        """SIGKILL of the driver, if there is one."""
        driver, self._driver = self._driver, None
        if driver is None:
            return False
        driver.kill()
        driver.wait()
        return True

    def driver_ended(self) -> int | None:
        """Exit code of a driver that ended by itself; None while it lives. The next `start` submits again."""
        if self._driver is None or (code := self._driver.poll()) is None:
            return None
        self._driver = None
        return code

    def last_words(self, num_chars: int = 600) -> str:
        """The end of the log."""
        return self.log.read_text(errors="replace")[-num_chars:] if self.log.exists() else ""

    def members(self) -> list[int]:
        """Living processes of the cluster."""
        return self._head.members() if self._head is not None else []

    def actors(self, name: str) -> list[int]:
        """Living processes that are actors of this class, by the title that Ray gives them."""
        title = f"ray::{name}".encode()
        return [pid for pid in self.members() if title in _command_line(pid)]


def _command_line(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
