"""This rank's fp32 weights of the newest version of each layer, in host memory: residuals count from them.

Filled by a recovery, then by the writer thread alone, from the very bytes that it writes. So a copy is that
of the version that was written last; whoever takes a residual from it names the version that is meant.
"""

from collections.abc import Callable, Mapping

import numpy as np

from layercheck.errors import LayerCheckError
from layercheck.persistence.quantise import Floats

Base = tuple[int, int]
"""(step, attempt) of a version."""


class BaseCopies:
    """Copies by layer and parameter.

    Args:
        covers: which layers are kept.
    """

    def __init__(self, covers: Callable[[str], bool]) -> None:
        self.covers = covers
        self._bases: dict[str, Base] = {}
        self._copies: dict[str, dict[str, Floats]] = {}

    def room(self, layer: str, parameter: str, numel: int) -> Floats:
        """The copy of one slice, to be written by the caller; until `done` the layer has no base."""
        self._bases.pop(layer, None)
        copies = self._copies.setdefault(layer, {})
        if parameter not in copies:
            copies[parameter] = np.empty(numel, dtype=np.float32)
        assert copies[parameter].size == numel, f"{parameter} has {numel} elements on this rank"
        return copies[parameter]

    def done(self, layer: str, base: Base) -> None:
        """All copies of a layer are those of this version."""
        self._bases[layer] = base

    def keep(self, layer: str, base: Base, weights: Mapping[str, Floats]) -> None:
        """Copies a version that recovery has fetched: its weights by parameter."""
        if self.covers(layer):
            for parameter, values in weights.items():
                self.room(layer, parameter, values.size)[:] = values
            self.done(layer, base)

    def of(self, layer: str, parameter: str, base: Base) -> Floats:
        """The copy of one slice.

        Raises:
            LayerCheckError: what is kept is not that version.
        """
        if self._bases.get(layer) != base:
            raise LayerCheckError(
                f"layer {layer}: a residual needs the weights of version {base}, kept are those of "
                f"{self._bases.get(layer)}",
                layer=layer,
            )
        return self._copies[layer][parameter]
