"""How often worker groups failed: one small file in `<run>/ray/failures/` for each time.

How long an outage took is the coordinator's to say, see the receipt; a run without one has only these files.
"""

import json
import time
from typing import Any

from ray.train import UserCallback

from app.runfiles import RunFiles

FOLDER = "ray/failures"


class FailureNotes(UserCallback):
    """Runs in the controller of Ray Train."""

    def __init__(self, folder: str, submission: str) -> None:
        self._folder = folder
        self._submission = submission

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Workers ended; the group will be restarted or given up."""
        note = {"time_s": time.time(), "submission": self._submission, "ranks": sorted(worker_exceptions)}
        name = f"{FOLDER}/{time.time_ns()}.json"
        RunFiles(self._folder).write(name, json.dumps(note).encode())


def count_failures(files: RunFiles, submission: str) -> int:
    """How often a worker group of this submission failed."""
    return len(failure_times_s(files, submission))


def failure_times_s(files: RunFiles, submission: str) -> list[float]:
    """When, in seconds since the epoch by the clock of the controller's machine."""
    notes = [json.loads(files.read(path)) for path in files.paths(FOLDER) if path.endswith(".json")]
    return sorted(note["time_s"] for note in notes if note["submission"] == submission)
