"""A store and the notes of its ranks as the judge of a campaign finds them, without a run that wrote them."""

import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from cluster.campaign_checks import Judge
from cluster.witness import Hashes, hash_of
from layercheck.manifest import EventId
from layercheck.persistence.quantise import Code, Floats, dequantise, quantise
from layercheck.persistence.shard_file import (
    ResidualMeta,
    ShardAbout,
    ShardTensor,
    SliceMeta,
    StateScalar,
    layout,
)

LAYERS = ("embed", "norm")
S_MAX = 6
NUMEL = 4
State = tuple[int, int]
"""(step, attempt)."""


def values(layer: str, step: int, attempt: int, rank: int = 0, state: str = "fp32") -> Floats:
    """What a rank has of a layer; the weights of step 0 are the same in all attempts."""
    offset = {"fp32": 0.0, "exp_avg": 100.0}[state]
    return np.array([len(layer), step, attempt if step else 0, rank], np.float32) / 7 + np.float32(offset)


def hash_from(layer: str, weights: Floats, moments: Floats, step: int) -> str:
    return hash_of(
        {f"{layer}.w/fp32": weights.tobytes(), f"{layer}.w/exp_avg": moments.tobytes()},
        {f"{layer}.w": {"step": {"kind": "int", "value": step}}},
    )


def hashes(step: int, attempt: int, rank: int = 0) -> Hashes:
    """What a rank notes after a step."""
    return {
        layer: hash_from(
            layer,
            values(layer, step, attempt, rank),
            values(layer, step, attempt, rank, "exp_avg"),
            step,
        )
        for layer in LAYERS
    }


def rounded(layer: str, residual: State, base: State, rank: int, code: Code) -> Floats:
    """The distance as it comes back."""
    distance = values(layer, *residual, rank) - values(layer, *base, rank)
    return dequantise(*quantise(distance, code), NUMEL, code)


@dataclass
class Store:
    """A run of some ranks, written as it lies on disk."""

    folder: Path
    notes: Path
    ranks: int = 1
    code: Code = field(default_factory=lambda: Code(bits=8, block=64))

    def __post_init__(self) -> None:
        self.links: list[dict[str, int]] = []
        self._numbers = count(1000)
        for name in ("attempts", "events", "history"):
            (self.folder / name).mkdir(parents=True)
        self.notes.mkdir()
        (self.folder / "run.json").write_text(json.dumps({"config": {"checkpoint": {"s_max": S_MAX}}}))

    def attempt(self, r_b: int, saw_step: int, steps: range, plan: dict[str, Any] | None = None) -> int:
        """Claims the next attempt and runs its steps. `plan` as `plan_for` made it."""
        number = len(self.links) + 1
        self.links.append({"attempt": number, "r_b": r_b, "saw_step": saw_step})
        record = {"attempt": number, "r_b": r_b, "lineage": self.links}
        (self.folder / f"attempts/a{number:03d}.json").write_text(json.dumps(record))
        installed = plan.pop("installed") if plan else [hashes(0, 0, rank) for rank in range(self.ranks)]
        for rank in range(self.ranks):
            lines: list[dict[str, Any]] = [{"what": "built", "layers": {} if plan else hashes(0, 0, rank)}]
            begun = {"attempt": number, "resume_step": r_b + 1, "plan": plan}
            lines.append({"what": "begun", **begun, "layers": installed[rank]})
            lines += [{"what": "step", "step": step, "layers": hashes(step, number, rank)} for step in steps]
            text = "".join(json.dumps(line) + "\n" for line in lines)
            (self.notes / f"rank-{rank:05d}.{next(self._numbers)}.jsonl").write_text(text)
        return number

    def commit(
        self,
        step: int,
        attempt: int,
        *layers: str,
        residuals: Mapping[str, State] | None = None,
        wrong: Mapping[str, Floats] | None = None,
    ) -> Path:
        """One event of versions and residuals; returns its folder.

        Args:
            step: of it.
            attempt: that made it.
            layers: get versions.
            residuals: layer -> version that its residual adds to.
            wrong: layer -> other weights than those it had.
        """
        bases = residuals or {}
        folder = self.folder / EventId(step=step, attempt=attempt).folder
        folder.mkdir()
        for rank in range(self.ranks):
            versions = {layer: self._version(layer, step, attempt, rank, wrong or {}) for layer in layers}
            added = {layer: self._residual(layer, (step, attempt), bases[layer], rank) for layer in bases}
            about = ShardAbout(step=step, attempt=attempt, rank=rank, world_size=self.ranks)
            write_shard(folder / f"rank-{rank:05d}.safetensors", versions | added, bases, self.code, about)
        rows = [{"layer": layer, "step": step, "attempt": attempt} for layer in layers]
        if bases:
            rows = [row | {"kind": "version", "base_step": -1, "base_attempt": 0} for row in rows]
            rows += [
                {"layer": layer, "step": step, "attempt": attempt, "kind": "residual"}
                | {"base_step": base_step, "base_attempt": base_attempt}
                for layer, (base_step, base_attempt) in bases.items()
            ]
        pq.write_table(pa.Table.from_pylist(rows), folder / "commit.parquet")
        return folder

    def _version(
        self, layer: str, step: int, attempt: int, rank: int, wrong: Mapping[str, Floats]
    ) -> dict[str, bytes]:
        weights = wrong.get(layer, values(layer, step, attempt, rank))
        moments = values(layer, step, attempt, rank, "exp_avg")
        return {"fp32": weights.tobytes(), "exp_avg": moments.tobytes()}

    def _residual(self, layer: str, state: State, base: State, rank: int) -> dict[str, bytes]:
        distance = values(layer, *state, rank) - values(layer, *base, rank)
        codes, scales = quantise(distance, self.code)
        return {"residual": codes.tobytes(), "residual_scale": scales.tobytes()}

    def collect(self, step: int, attempt: int) -> None:
        """The rows go to the history, as merged parts have them; the event goes."""
        folder = self.folder / EventId(step=step, attempt=attempt).folder
        rows = pq.read_table(folder / "commit.parquet").to_pylist()
        nothing = {"kind": None, "base_step": None, "base_attempt": None}
        table = pa.Table.from_pylist([nothing | row for row in rows])
        pq.write_table(table, self.folder / f"history/attempt-{attempt:03d}-{step:05d}.parquet")
        shutil.rmtree(folder)

    def plan_for(
        self, t_fail: int, residuals: Mapping[str, State] | None = None, **versions: State
    ) -> dict[str, Any]:
        """A receipt that took these, and what each rank has installed by it.

        Args:
            t_fail: last step that was complete.
            residuals: layer -> (step, attempt) of its residual.
            versions: layer -> (step, attempt).
        """
        added = residuals or {}
        installed: list[Hashes] = []
        for rank in range(self.ranks):
            found = {layer: hashes(*version, rank)[layer] for layer, version in versions.items()}
            found |= {layer: self.sum_of(layer, versions[layer], added[layer], rank) for layer in added}
            installed.append(found)
        layers = [
            {"name": name, "step": step, "attempt": attempt}
            | {"residual": added[name][0] if name in added else None}
            for name, (step, attempt) in versions.items()
        ]
        return {
            "mode": "composite",
            "t_fail": t_fail,
            "max_age": max(t_fail - step for step, _ in versions.values()),
            "bad": [],
            "layers": layers,
            "installed": installed,
        }

    def sum_of(self, layer: str, version: State, residual: State, rank: int) -> str:
        """Hash of what a residual makes of a version: its weights alone."""
        weights = values(layer, *version, rank) + rounded(layer, residual, version, rank, self.code)
        return hash_from(layer, weights, values(layer, *version, rank, "exp_avg"), version[0])

    def judge(self) -> Judge:
        judge = Judge(self.folder, self.notes)
        judge.finish()
        return judge


def write_shard(
    path: Path,
    content: Mapping[str, Mapping[str, bytes]],
    bases: Mapping[str, State],
    code: Code,
    about: ShardAbout,
) -> None:
    """One rank's file; `content` is layer -> tensor -> bytes, `bases` names the residuals of it."""
    kinds = {"fp32": "F32", "exp_avg": "F32", "residual": code.dtype, "residual_scale": "BF16"}
    sizes = {"F32": 4, "BF16": 2, "I8": 1, "U8": 1}
    tensors = [
        ShardTensor(f"{layer}.w", state, layer, kinds[state], len(data) // sizes[kinds[state]])
        for layer, states in content.items()
        for state, data in states.items()
    ]
    slices = [
        SliceMeta(
            parameter=f"{layer}.w",
            layer=layer,
            step=about.step,
            shape=(NUMEL * about.world_size,),
            offset=NUMEL * about.rank,
            numel=NUMEL,
            state={} if layer in bases else {"step": StateScalar(kind="int", value=about.step)},
            residual=_meta(code, bases[layer]) if layer in bases else None,
        )
        for layer in content
    ]
    header = layout(tensors, slices, about).header
    path.write_bytes(header + b"".join(data for states in content.values() for data in states.values()))


def _meta(code: Code, base: State) -> ResidualMeta:
    return ResidualMeta(bits=code.bits, block=code.block, base_step=base[0], base_attempt=base[1])
