"""What a store holds, read as it lies: attempt records, commits, shard files; for the judge of a campaign.

Nothing of the planning and fetching code is used. Files may go while they are read.
"""

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.witness import hash_of
from layercheck.errors import LayerCheckError

_LOOKS = 10
State = tuple[int, int]
"""(step, attempt). All versions of one layer in this state hold the same bytes."""


@dataclass(frozen=True)
class Link:
    """One attempt of a chain: it began after step `r_b`, and saw its predecessor's commits to `saw_step`."""

    attempt: int
    r_b: int
    saw_step: int


Chain = tuple[Link, ...]
"""An attempt's lineage, oldest first; the last link is its own."""


def read_chains(store: Path) -> dict[int, Chain]:
    """Attempt -> its lineage, of every attempt record that can be read."""
    chains = {}
    for path in (store / "attempts").glob("a[0-9]*.json"):
        if path.name.count(".") == 1:
            record = json.loads(path.read_text())
            links = [Link(link["attempt"], link["r_b"], link["saw_step"]) for link in record["lineage"]]
            chains[int(record["attempt"])] = tuple(links)
    return chains


# ---------------------------------------------------------------- what was committed


@dataclass(frozen=True, slots=True)
class Save:
    """One committed save of one layer.

    Attributes:
        folder: of its event; empty for one that was collected.
        base: of a residual: the version that it adds to; None makes this a version.
    """

    layer: str
    step: int
    attempt: int
    folder: str = ""
    base: State | None = None

    @property
    def state(self) -> State:
        """Step and attempt that it was taken in."""
        return self.step, self.attempt


def committed_saves(store: Path) -> set[Save]:
    """Every save that was ever committed; one whose event is just being collected may be there twice.

    Events are read first: the rows of one that goes meanwhile are in the history before it does.
    """
    saves: set[Save] = set()
    for path in (store / "events").glob("*/commit.parquet"):
        with suppress(FileNotFoundError):
            saves |= _saves(path, f"events/{path.parent.name}")
    return saves | _collected(store / "history")


def _collected(history: Path) -> set[Save]:
    """A part that is gone was merged into a new one, which the list of a moment ago does not have."""
    for _ in range(_LOOKS):
        with suppress(FileNotFoundError):
            return {save for path in history.glob("*.parquet") for save in _saves(path, "")}
    raise LayerCheckError(f"{history}: files went in each of {_LOOKS} looks", path=str(history))


def _saves(path: Path, folder: str) -> set[Save]:
    try:
        rows = pq.read_table(path).to_pylist()
    except pa.ArrowInvalid:
        return set()  # what cannot be read counts as absent
    return {Save(row["layer"], row["step"], row["attempt"], folder, _base(row)) for row in rows}


def _base(row: dict[str, Any]) -> State | None:
    """Files without residuals lack these columns; merged ones have nulls there."""
    return (row["base_step"], row["base_attempt"]) if row.get("kind") == "residual" else None


# ---------------------------------------------------------------- what the shard files hold


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of one layer, as a shard file has it.

    Attributes:
        tensors: `<parameter>/<state>` -> its bytes; those without any are left out.
        about: parameter -> what the header says of it.
    """

    tensors: dict[str, bytes] = field(default_factory=dict)
    about: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def hash(self) -> str:
        """Made as the witness makes it."""
        return hash_of(self.tensors, {parameter: about["state"] for parameter, about in self.about.items()})


def read_parts(path: Path) -> dict[str, Part]:
    """Layer -> its part of a shard file.

    Raises:
        FileNotFoundError: it was collected meanwhile.
    """
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    texts = header.pop("__metadata__")
    about = {parameter: json.loads(text) for parameter, text in texts.items() if parameter != "layercheck"}
    parts = {one["layer"]: Part() for one in about.values()}
    for parameter, one in about.items():
        parts[one["layer"]].about[parameter] = one
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if end > begin:
            layer = about[name.rpartition("/")[0]]["layer"]
            parts[layer].tensors[name] = content[start + begin : start + end]
    return parts


def find_part(store: Path, saves: Iterable[Save], rank: int) -> Part | None:
    """One rank's part of the first save whose file is still there; None if all are gone."""
    for save in saves:
        with suppress(FileNotFoundError):
            if save.folder:
                path = store / save.folder / f"rank-{rank:05d}.safetensors"
                return read_parts(path).get(save.layer, Part())
    return None
