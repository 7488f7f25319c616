"""What a layer that comes back with a residual has to be, and which residual it has to come back with.

A residual adds to the weights of one version; moments and scalars stay those of the version. The sum is made
here once more, from the two shard files as they lie.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from cluster.campaign_files import Part, Save, State, find_part
from layercheck.persistence.quantise import Code, Floats, dequantise
from layercheck.persistence.shard_file import MASTER, RESIDUAL, SCALE


def versions_of(saves: Iterable[Save], layer: str, version: State) -> list[Save]:
    """The saves of one version of a layer: any of them will do."""
    return [save for save in saves if save.layer == layer and save.state == version and save.base is None]


def residuals_of(saves: Iterable[Save], layer: str, version: State) -> list[Save]:
    """The residuals of one version of a layer, newest first."""
    found = [save for save in saves if save.layer == layer and save.base == version]
    return sorted(found, key=lambda save: save.state, reverse=True)


def missed(residuals: Sequence[Save], taken: int | None) -> Save | None:
    """The residual that should have been taken instead of one of step `taken` or of none; None if right.

    Args:
        residuals: those of the version that count, newest first.
        taken: what the receipt says.
    """
    is_newer = bool(residuals) and (taken is None or residuals[0].step > taken)
    return residuals[0] if is_newer else None


def restored(store: Path, versions: Sequence[Save], residuals: Sequence[Save], rank: int) -> Part | None:
    """One rank's part of a layer as it has to come back; None if a file that it is made of is gone.

    Args:
        store: the run's `layercheck` folder.
        versions: those of the version.
        residuals: those of the one residual; not empty.
        rank: whose part.
    """
    version = find_part(store, versions, rank)
    residual = find_part(store, residuals, rank)
    if version is None or residual is None:
        return None
    return added(version, residual, residuals[0].base)


def added(version: Part, residual: Part, base: State | None) -> Part:
    """A version whose weights a residual moved, in fp32.

    What is no residual of it gives an empty part, which nobody can have installed.
    """
    if {p: _place(version, p) for p in version.about} != {p: _place(residual, p) for p in residual.about}:
        return Part()
    if any(_base_of(residual, parameter) != base for parameter in residual.about):
        return Part()
    tensors = dict(version.tensors)
    for parameter, about in version.about.items():
        if about["numel"]:
            name = f"{parameter}/{MASTER}"
            weights = np.frombuffer(tensors[name], np.float32)
            tensors[name] = (weights + _distance(residual, parameter)).tobytes()
    return replace(version, tensors=tensors)


def _place(part: Part, parameter: str) -> tuple[int, int]:
    about = part.about[parameter]
    return about["offset"], about["numel"]


def _base_of(part: Part, parameter: str) -> State | None:
    about = part.about[parameter].get("residual")
    return None if about is None else (about["base_step"], about["base_attempt"])


def _distance(part: Part, parameter: str) -> Floats:
    about = part.about[parameter]
    code = Code(about["residual"]["bits"], about["residual"]["block"])
    codes = np.frombuffer(part.tensors[f"{parameter}/{RESIDUAL}"], np.int8)
    scales = np.frombuffer(part.tensors[f"{parameter}/{SCALE}"], np.uint16)
    return dequantise(codes, scales, about["numel"], code)
