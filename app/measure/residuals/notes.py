"""What a killed run leaves beside its store: the weights it had, those that came back, samples of them."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file, save_file

from app.measure.residuals.spec import KilledRun, Recovered
from layercheck.persistence.quantise import Floats

BLOCK = 64
"""Values that share a scale: a sample holds whole blocks, so that its quantisation is that of the layer."""
_EVERY = 16

Weights = Mapping[tuple[str, str], Floats]
"""fp32 weights by (layer, parameter), each of shape (numel,)."""


def distances(lost: Weights, back: Weights) -> tuple[float, dict[str, float]]:
    """Mean |lost - back| over all weights, and by layer. Both have the same parameters."""
    total: dict[str, float] = {}
    numel: dict[str, int] = {}
    for (layer, parameter), values in lost.items():
        moved = np.abs(values.astype(np.float64) - back[layer, parameter]).sum()
        total[layer] = total.get(layer, 0.0) + float(moved)
        numel[layer] = numel.get(layer, 0) + values.size
    return sum(total.values()) / sum(numel.values()), {name: total[name] / numel[name] for name in total}


def notes_of(folder: Path, run: KilledRun) -> Path:
    """The folder of a run's notes, in that of all runs."""
    return folder / f"{run.name}-notes"


class Notes:
    """The files of one run in a folder of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def keep_lost(self, step: int, weights: Weights) -> None:
        """The weights after the last step before a kill."""
        parts = {f"{layer}/{parameter}": values for (layer, parameter), values in weights.items()}
        temporary = self.folder / "lost.tmp"
        save_file(parts, temporary)
        temporary.rename(self.folder / f"lost-{step}.safetensors")

    @property
    def killed_at(self) -> list[int]:
        """The steps after which this run was killed, in order."""
        return sorted(int(path.stem.removeprefix("lost-")) for path in self.folder.glob("lost-*.safetensors"))

    def lost(self, step: int) -> Weights:
        """What was kept of a kill."""
        parts = load_file(self.folder / f"lost-{step}.safetensors")
        return {tuple(name.split("/")): values for name, values in parts.items()}  # type: ignore[misc]

    def add(self, recovered: Recovered) -> None:
        """Writes one recovery down."""
        text = recovered.model_dump_json(indent=1) + "\n"
        (self.folder / f"recovered-{recovered.killed_at}.json").write_text(text)

    def finish(self, run: KilledRun) -> None:
        """Says that this run came to its end."""
        (self.folder / "done.json").write_text(run.model_dump_json() + "\n")

    def has_finished(self, run: KilledRun) -> bool:
        """True if the notes are those of just this run, and whole."""
        done = self.folder / "done.json"
        return done.exists() and KilledRun.model_validate_json(done.read_text()) == run

    def recoveries(self) -> list[Recovered]:
        """All recoveries, in order."""
        texts = [path.read_text() for path in self.folder.glob("recovered-*.json")]
        return sorted(map(Recovered.model_validate_json, texts), key=lambda one: one.killed_at)


# ---------------------------------------------------------------- samples of the weights


@dataclass(frozen=True)
class Samples:
    """Some blocks of every parameter after each step.

    Attributes:
        weights: shape (steps, values); row 0 is that of step 1.
        layers: layer -> its columns; whole blocks of `BLOCK` values.
        share: shape (values,), the part of all parameters that a value stands for; the sum is 1.
    """

    weights: Floats
    layers: Mapping[str, slice]
    share: npt.NDArray[np.float64]


class Sampler:
    """Appends samples to files in a folder.

    A parameter smaller than a block is left out: it has no block.
    """

    def __init__(self, folder: Path, weights: Weights) -> None:
        self._folder, self._blocks = folder, dict(_blocks(weights))
        columns, share, begin = {}, [], 0
        total = sum(weights[key].size for key in self._blocks)
        for key, blocks in self._blocks.items():
            size = blocks.size * BLOCK
            first = columns.get(key[0], (begin, begin))[0]
            columns[key[0]] = (first, begin + size)
            share += [weights[key].size / size / total] * size
            begin += size
        np.array(share).tofile(folder / "share.f64")
        (folder / "layers.json").write_text(json.dumps(columns) + "\n")

    def add(self, weights: Weights) -> None:
        """One step."""
        parts = [_as_blocks(weights[key])[blocks].reshape(-1) for key, blocks in self._blocks.items()]
        with (self._folder / "samples.f32").open("ab") as file:
            file.write(np.concatenate(parts).tobytes())


def read_samples(folder: Path) -> Samples:
    """What a `Sampler` wrote."""
    share = np.fromfile(folder / "share.f64", dtype=np.float64)
    weights = np.fromfile(folder / "samples.f32", dtype=np.float32).reshape(-1, share.size)
    columns = json.loads((folder / "layers.json").read_text())
    return Samples(weights, {name: slice(*ends) for name, ends in columns.items()}, share)


def _blocks(weights: Weights) -> Iterator[tuple[tuple[str, str], npt.NDArray[np.intp]]]:
    """The blocks that are sampled of each parameter; the parameters of a layer follow each other."""
    for number, key in enumerate(sorted(weights)):
        count = weights[key].size // BLOCK
        if count:
            yield key, np.arange(number % min(_EVERY, count), count, _EVERY)


def _as_blocks(values: Floats) -> Floats:
    return values[: values.size // BLOCK * BLOCK].reshape(-1, BLOCK)
