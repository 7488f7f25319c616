"""How far each layer is from its newest version: the norm of W(t) - W(t_l).

A version's sample of the weights is kept from its selection on, at one fixed phase. Versions in flight may be
lost, so the sample before them stays until a newer one is known to be committed.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from layercheck.tracking.sample import SubGroupSample, norms


class References:
    """Samples of the weights at the versions of each layer.

    Args:
        samples: what is looked at, per sub-group.
        order: 1 or 2, the norm.
        device: where the partitions live.
    """

    def __init__(self, samples: Sequence[SubGroupSample], order: int, device: torch.device) -> None:
        self._order, self._device = order, device
        self._of_layer: dict[str, list[SubGroupSample]] = {}
        for sample in samples:
            self._of_layer.setdefault(sample.layer, []).append(sample)
        self._weights: dict[str, Tensor] = {}
        self._kept: dict[str, dict[int, list[Tensor]]] = {layer: {} for layer in self._of_layer}
        """Layer -> step of a version -> copies of its elements, in the order in which they were taken."""

    def take(self, step: int, layers: Iterable[str]) -> None:
        """A version of these layers holds the weights as they are now."""
        for layer in layers:
            if layer in self._kept:
                self._kept[layer].pop(step, None)
                self._kept[layer][step] = [view.clone() for view in self._views(layer)]

    def commit(self, step: int) -> None:
        """The event of this step exists; nothing older can come back."""
        for kept in self._kept.values():
            if step in kept:
                for older in [other for other in kept if other < step]:
                    del kept[older]

    def lose(self, step: int) -> None:
        """The event of this step does not exist: the version before it counts again."""
        for kept in self._kept.values():
            kept.pop(step, None)

    def sums(self, layers: Sequence[str]) -> Tensor:
        """sum|W - W_l|^order and sum|W|^order of each layer over this rank's elements, shape (2, layers).

        A layer without a version has not moved.
        """
        found = torch.zeros(2, len(layers), dtype=torch.float64, device=self._device)
        for index, layer in enumerate(layers):
            kept = self._kept.get(layer)
            if kept:
                views, newest = self._views(layer), list(kept.values())[-1]
                weights = self._weights_of(layer)
                moved = torch.stack(norms(list(torch._foreach_sub(views, newest)), self._order))
                held = torch.stack(norms(views, self._order))
                for row, values in enumerate((moved, held)):
                    found[row, index] = (values.double() ** self._order * weights).sum()
        return found

    def _weights_of(self, layer: str) -> Tensor:
        """They never change, so they go to the device once."""
        if layer not in self._weights:
            weights = [weight for sample in self._of_layer[layer] for weight in sample.weights(0)]
            self._weights[layer] = torch.tensor(weights).double().to(self._device)
        return self._weights[layer]

    def _views(self, layer: str) -> list[Tensor]:
        return [view for sample in self._of_layer[layer] for view in sample.views(0)]
