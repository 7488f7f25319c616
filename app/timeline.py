"""When workers failed and when they came back: the phases of a recovery that the workers cannot see.

Each happening is one small file in `<run>/ray/timeline/`. Its times come from the clocks of the controller's
and the workers' machines; they are for people, nothing decides by them.
"""

import json
import time
from dataclasses import dataclass
from typing import Any, Literal

from ray.train import UserCallback

from app.runfiles import RunFiles

FOLDER = "ray/timeline"
What = Literal["failed", "entered"]


@dataclass(frozen=True, slots=True)
class Happening:
    """`failed`: the controller learned that workers ended. `entered`: rank 0 entered the train function."""

    what: What
    time_s: float
    submission: str


def note(files: RunFiles, what: What, submission: str) -> None:
    """Writes one happening of this moment."""
    now = time.time()
    record = {"what": what, "time_s": now, "submission": submission}
    files.write(f"{FOLDER}/{int(now * 1000)}-{what}.json", json.dumps(record).encode())


def happenings(files: RunFiles) -> list[Happening]:
    """All happenings of a run, in order of time."""
    found = [
        Happening(**json.loads(files.read(path))) for path in files.paths(FOLDER) if path.endswith(".json")
    ]
    return sorted(found, key=lambda happening: happening.time_s)


class FailureNotes(UserCallback):
    """Runs in the controller of Ray Train."""

    def __init__(self, folder: str, submission: str) -> None:
        self._folder = folder
        self._submission = submission

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        """Workers ended; the group will be restarted or given up."""
        note(RunFiles(self._folder), "failed", self._submission)


def phases(kills: list[float], events: list[Happening], began_s: float) -> tuple[float | None, float | None]:
    """Detection and restart of one recovery.

    Args:
        kills: times of injected kills.
        events: happenings of the run, in order of time.
        began_s: when the recovering attempt was claimed.

    Returns:
        Seconds from the kill to `failed`, and from `failed` to `entered`; None where the start is not known,
        such as the time of a death that nobody injected.
    """
    entered = max((e.time_s for e in events if e.what == "entered" and e.time_s <= began_s), default=None)
    if entered is None:
        return None, None
    failed = max((e.time_s for e in events if e.what == "failed" and e.time_s <= entered), default=None)
    if failed is None:
        return None, None
    lived_since = max((e.time_s for e in events if e.what == "entered" and e.time_s < failed), default=0.0)
    killed = max((kill for kill in kills if lived_since <= kill <= failed), default=None)
    return (None if killed is None else failed - killed), entered - failed
