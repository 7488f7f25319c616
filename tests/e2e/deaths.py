"""Runs of the campaign's tiny model whose parts die in turn."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cluster.campaign_checks import Judge
from cluster.head import PrivateHead, PrivateNode
from cluster.witness import Notes
from layercheck.cli import main as layercheck
from tests.e2e.runs import ROOT, summary

STEPS = 30
RUN = "run"
COORDINATOR = "ray::CoordinatorActor"


class Deaths:
    """One run: its driver, its storage, what it left.

    `settings` are those of every submission; keys as in the app's configuration.
    """

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.storage, self.notes, self.log = folder / "storage", folder / "witness", folder / "run.log"
        self.run = self.storage / RUN
        self.store = self.run / "layercheck"
        self.settings = {"train.steps": STEPS, "faults.witness": self.notes, **settings}
        self.driver: subprocess.Popen[bytes] | None = None

    def submit(self, head: PrivateHead) -> None:
        """Starts a driver, as a person would; the last one is gone."""
        command = [sys.executable, "-m", "app", "--config", "campaign", "--run-name", RUN]
        command += ["--storage", str(self.storage)]
        with open(self.log, "ab") as log:
            self.driver = subprocess.Popen(
                [*command, "--set", *(f"{key}={value}" for key, value in self.settings.items())],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT), **head.env},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    def end_driver(self) -> None:
        """SIGKILL."""
        assert self.driver is not None
        self.driver.kill()
        self.driver.wait(30)

    def finish(self, limit_s: float = 240) -> int:
        """Waits for the driver's exit code."""
        assert self.driver is not None
        return self.driver.wait(limit_s)

    def wait(
        self, condition: Callable[[], bool], what: str, limit_s: float = 180, look_s: float = 0.05
    ) -> None:
        """Waits while the driver lives."""
        assert self.driver is not None
        deadline = time.monotonic() + limit_s
        while not condition():
            assert self.driver.poll() is None, f"ended with {self.driver.returncode}: {self.words()}"
            assert time.monotonic() < deadline, f"not within {limit_s:g} s: {what}; {self.words()}"
            time.sleep(look_s)

    def wait_for_step(self, step: int, attempt: int = 1) -> None:
        self.wait(lambda: self.reached(attempt) >= step, f"step {step} of attempt {attempt}")

    def reached(self, attempt: int) -> int:
        """Newest step that rank 0 of an attempt noted, 0 before the first."""
        lives = [life for life in Notes(self.notes).lives() if (life.attempt, life.rank) == (attempt, 0)]
        return max((life.steps[-1][0] for life in lives if life.steps), default=0)

    def words(self) -> str:
        return self.log.read_text(errors="replace")[-3000:]

    # ------------------------------------------------------------------ what came of it

    def receipts(self) -> list[dict[str, Any]]:
        paths = sorted(self.store.glob("attempts/*.receipt.json"))
        return [json.loads(path.read_text()) for path in paths]

    def summary(self) -> dict[str, Any]:
        return summary(self.run)

    def check_end(self) -> None:
        """The run is complete, every step was run once, every byte is that of its step."""
        assert self.summary()["status"] == "completed", self.words()
        assert self.summary()["steps"] == self.settings["train.steps"]
        self.check_store()

    def check_store(self) -> None:
        judge = Judge(self.store, self.notes)
        judge.finish()
        assert judge.verdict.problems == []
        assert judge.verdict.compared > 0
        assert layercheck(["verify", str(self.run)]) == 0


def process_of(node: PrivateNode, name: str) -> int:
    """The one process of a node whose command line has `name`."""
    found = processes_of(node, name)
    assert len(found) == 1, f"{name}: {found}"
    return found[0]


def processes_of(node: PrivateNode, name: str) -> list[int]:
    """The processes of a node whose command line has `name`."""
    found = []
    for pid in node.members():
        with suppress(FileNotFoundError, ProcessLookupError):  # gone meanwhile
            if name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
    return found


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
