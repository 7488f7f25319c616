"""What DeepSpeed itself offers: `engine.save_checkpoint` every k steps, `engine.load_checkpoint`."""

import re
import warnings
from pathlib import Path
from typing import Any

from app.baselines.commits import Commit, FileRecord
from app.baselines.committer import Committer, Saved
from app.baselines.newest import check_files
from app.baselines.protocol import Recovered, StepCost
from app.baselines.rolling import Books, must_be_saved, roll_back
from layercheck.errors import DamagedShardError
from layercheck.manifest import TrainerState
from layercheck.partition import SubGroup
from layercheck.zero3 import Zero3Engine

TAG = "state"
_RANK_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_\d+_.*\.pt")


class DeepSpeedCheckpoints:
    """DeepSpeed's default checkpoint (the paper's first baseline, section 4; DeepSpeed 0.19.8).

    All ranks stop while each writes its partition by `torch.save` (12 bytes a parameter in all) and rank 0
    writes `latest`. Around it, as around every other method: fsync, checksums, a commit record; so a torn
    checkpoint is passed over, where DeepSpeed would read whatever `latest` names. Each commit's folder is a
    whole `save_dir` with its own `latest`. `torch.load` of these files, which we wrote ourselves and whose
    checksums were compared first, is DeepSpeed's own; it unpickles.

    A storage that refuses one rank leaves the others in DeepSpeed's barrier: the watchdog ends the group.

    Simplified: nothing of the method. Not taken: its FastPersist writers, whose files its loader refuses.
    Since the checksums are of a second read, from the page cache, they cost a little more than elsewhere.
    """

    def __init__(self, zero3: Zero3Engine, committer: Committer, interval_steps: int) -> None:
        self._zero3, self._committer = zero3, committer
        self._engine: Any = zero3.engine
        self._interval = interval_steps
        self._books = Books()
        self._attempt = 0

    def recover(self) -> Recovered | None:
        """Checks every file of the newest commit, then has DeepSpeed load it."""
        store = self._committer.store
        return roll_back(self._committer, self._zero3, check_files(store, self._zero3.rank), self._load)

    def _load(self, commit: Commit, _: None) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            path, _ = self._engine.load_checkpoint(str(self._folder(commit.step)), tag=TAG)
        stale = self._zero3.stale_parameter()
        if path is None or stale is not None:
            raise DamagedShardError(
                f"DeepSpeed did not load {self._folder(commit.step)} whole ({path=}, {stale=})"
            )

    def _folder(self, step: int) -> Path:
        store = self._committer.store
        return Path(store.storage.root, store.folder(step))

    def begin(self, attempt: int, step: int) -> None:
        """See `Baseline`."""
        self._attempt, self._books.protected_step = attempt, step

    def after_step(self, step: int, state: TrainerState) -> None:
        """Saves every `interval_steps`; training waits for all of it."""
        if step % self._interval == 0:
            self._save(step, state, "interval")

    def save_now(self, step: int, state: TrainerState) -> None:
        """See `Baseline`."""
        if self._books.protected_step != step:
            must_be_saved(self._save(step, state, "last"), "deepspeed")

    def _save(self, step: int, state: TrainerState, kind: str) -> Saved:
        saved = self._committer.commit(step, self._attempt, state, lambda: self._write(step), kind)
        self._books.note(saved)
        return saved

    def _write(self, step: int) -> tuple[FileRecord, ...]:
        folder = self._folder(step)
        self._engine.save_checkpoint(str(folder), tag=TAG)
        store, rank = self._committer.store, self._zero3.rank
        names = [str(path.relative_to(folder)) for path in sorted(folder.rglob("*")) if path.is_file()]
        files = tuple(store.adopt_file(step, name) for name in names if _owner(name) == rank)
        store.settle(step, TAG)
        return files

    def before_update(self, group: SubGroup, lr: float) -> None:
        """Nothing is copied while training goes on."""

    def take_cost(self) -> StepCost:
        """See `Baseline`."""
        return self._books.take()

    def facts(self) -> dict[str, float]:
        """See `Baseline`."""
        return {"interval_steps": self._interval, **self._books.facts()}

    def close(self, *, wait: bool) -> None:
        """Nothing is on its way between two calls."""


def _owner(name: str) -> int:
    """The rank that checks a file: its own, or rank 0 for what it writes for all."""
    match = _RANK_FILE.fullmatch(name.rsplit("/", 1)[-1])
    return int(match[1]) if match else 0
