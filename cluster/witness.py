"""What a run's state really was, noted beside it by every rank: how a campaign knows wrong bytes.

A rank appends one JSON line to its own file when its engine is built, when its attempt has begun, and after
each optimizer step, before anything is saved. The hashes are of the live tensors; nothing of the saving path
is used. Costly for a large model: for campaigns and tests alone (`faults.witness`).
"""

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from xxhash import xxh3_128

from layercheck.receipt import ResumePoint

Hashes = dict[str, str]
"""Layer -> hash of one rank's part."""


class Witness:
    """Appends the notes of one process to `<folder>/rank-<rank>.<pid>.jsonl`."""

    def __init__(self, folder: str, rank: int) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)
        self._path = Path(folder) / f"rank-{rank:05d}.{os.getpid()}.jsonl"
        self._zero3: Any = None

    @classmethod
    def of(cls, folder: str | None, rank: int) -> Self | None:
        """The witness of a run that has a folder for one."""
        return None if folder is None else cls(folder, rank)

    def built(self, engine: Any, for_recovery: bool) -> None:
        """The engine is there; its weights are those of a fresh run unless it waits for a recovery."""
        from layercheck.zero3 import Zero3Engine  # loads torch

        self._zero3 = Zero3Engine(engine)
        self._note(what="built", layers={} if for_recovery else self._hashes())

    def begun(self, point: ResumePoint) -> None:
        """The attempt has begun: what was installed, and by which plan."""
        receipt = point.receipt
        plan = None if receipt is None else receipt.model_dump(mode="json")
        self._note(
            what="begun", attempt=point.attempt, resume_step=point.step, plan=plan, layers=self._hashes()
        )

    def stepped(self, step: int) -> None:
        """The optimizer has stepped, nothing of it is saved yet."""
        self._note(what="step", step=step, layers=self._hashes())

    def _hashes(self) -> Hashes:
        import torch

        zero3 = self._zero3
        return {
            layer: hash_of(
                {
                    f"{part.spec.name}/{state}": memoryview(tensor.cpu().view(torch.uint8).numpy())
                    for part in parts
                    for state, tensor in zero3.tensors(part).items()
                    if part.numel
                },
                {part.spec.name: zero3.scalars(part) for part in parts},
            )
            for layer, parts in zero3.slices.items()
        }

    def _note(self, **note: Any) -> None:
        # One write: a kill leaves the line whole or not at all.
        fd = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        try:
            os.write(fd, json.dumps(note).encode() + b"\n")
        finally:
            os.close(fd)


def hash_of(tensors: Mapping[str, Any], scalars: Mapping[str, Mapping[str, Any]]) -> str:
    """One hash of a layer's part: names, bytes and optimizer scalars, whatever their order.

    Args:
        tensors: `<parameter>/<state>` -> its bytes.
        scalars: parameter -> its optimizer scalars as `{key: {kind, value}}`.
    """
    digest = xxh3_128()
    for name in sorted(tensors):
        digest.update(name.encode())
        digest.update(tensors[name])
    digest.update(json.dumps(scalars, sort_keys=True).encode())
    return digest.hexdigest()


# ---------------------------------------------------------------- reading the notes


@dataclass(frozen=True)
class Life:
    """One process of one rank, as it noted itself.

    Attributes:
        built: hashes of the fresh weights; empty if the engine waited for a recovery.
        attempt: 0 if it ended before its attempt began.
        plan: the receipt as it was after the install, None for a fresh start.
        installed: hashes when the attempt had begun.
        steps: (step, hashes) in the order in which they were noted.
    """

    rank: int
    pid: int
    built: Hashes
    attempt: int = 0
    resume_step: int = 0
    plan: dict[str, Any] | None = None
    installed: Hashes | None = None
    steps: tuple[tuple[int, Hashes], ...] = ()


class Notes:
    """The notes of a run, read again only where they have grown: they are wanted several times a second."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[Path, tuple[int, Life]] = {}

    def lives(self) -> list[Life]:
        """All lives of the run, by attempt; those without one come first."""
        for path in self._folder.glob("rank-*.jsonl"):
            size = path.stat().st_size
            if path not in self._read or self._read[path][0] != size:
                self._read[path] = size, _life(path)
        lives = [life for _, life in self._read.values()]
        return sorted(lives, key=lambda life: (life.attempt, life.rank))


def _life(path: Path) -> Life:
    rank, pid = path.name.removeprefix("rank-").removesuffix(".jsonl").split(".")
    facts: dict[str, Any] = {"built": {}}
    steps: list[tuple[int, Hashes]] = []
    for note in _notes(path):
        what = note.pop("what")
        if what == "built":
            facts["built"] = note["layers"]
        elif what == "begun":
            facts |= {"installed": note.pop("layers"), **note}
        else:
            steps.append((note["step"], note["layers"]))
    return Life(int(rank), int(pid), steps=tuple(steps), **facts)


def _notes(path: Path) -> Iterator[dict[str, Any]]:
    *lines, _ = path.read_bytes().split(b"\n")  # what follows the last newline is a line being written
    yield from (json.loads(line) for line in lines)
