"""The layer map: which parameter belongs to which layer, from names alone."""

from collections.abc import Container, Iterable
from functools import cached_property
from math import prod
from typing import Literal, NamedTuple

from pydantic import BaseModel, ConfigDict

LayerKind = Literal["block", "embedding", "other"]
MASTER_BYTES = 4
"""Of an element that trains: its fp32 weight."""
VERSION_BYTES = MASTER_BYTES * 3
"""What a version holds of it with Adam: that weight and two moments, which are fp32 as well. Nothing else is
kept of an element, whatever the forward pass computes in."""


class ParamSpec(BaseModel):
    """One parameter. `shape` is the full (unpartitioned) shape."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def numel(self) -> int:
        """Number of elements over all ranks."""
        return prod(self.shape)


class LayerSpec(BaseModel):
    """One layer: the unit that is measured, saved and recovered. `params` in model order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    kind: LayerKind
    trainable: bool
    params: tuple[ParamSpec, ...]

    @cached_property
    def numel(self) -> int:
        """Number of elements over all ranks; the weight of this layer in size-weighted means."""
        return sum(param.numel for param in self.params)


class LayerStep(NamedTuple):
    """A layer and the step of the newest version that counts for it, -1 for none."""

    layer: str
    step: int


class LayerMap(BaseModel):
    """All layers of a model, in model order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    layers: tuple[LayerSpec, ...]

    @cached_property
    def by_name(self) -> dict[str, LayerSpec]:
        """Layer name -> layer."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def layer_of(self) -> dict[str, str]:
        """Parameter name -> layer name."""
        return {param.name: layer.name for layer in self.layers for param in layer.params}

    @cached_property
    def trainable(self) -> tuple[LayerSpec, ...]:
        """The layers that drift and are bounded by s_max."""
        return tuple(layer for layer in self.layers if layer.trainable)

    def without(self, names: Container[str]) -> "LayerMap":
        """The map without some layers."""
        return LayerMap(layers=tuple(layer for layer in self.layers if layer.name not in names))

    def difference(self, other: "LayerMap") -> str | None:
        """The first difference between two maps in words, or None if they agree."""
        mine, theirs = self._flat(), other._flat()
        for name, spec in mine.items():
            if name not in theirs:
                return f"parameter {name} is missing"
            if theirs[name] != spec:
                return f"parameter {name} is {theirs[name]}, not {spec}"
        extra = [name for name in theirs if name not in mine]
        return f"parameter {extra[0]} is new" if extra else None

    def _flat(self) -> dict[str, str]:
        return {
            param.name: f"{list(param.shape)} in layer {layer.name}"
            + ("" if layer.trainable else f" (frozen, {param.dtype})")
            for layer in self.layers
            for param in layer.params
        }


def layer_name(param: str, block_list: str | None, taken: dict[str, str]) -> str:
    """The layer that a parameter belongs to.

    Args:
        param: dotted parameter name, such as `model.layers.3.mlp.up_proj.weight`.
        block_list: dotted name of the longest ModuleList (`model.layers`), or None without blocks.
        taken: short layer name -> module it stands for; extended by this call, so that two modules with the
            same last name get their full names.

    Returns:
        `layers.3` for a block; otherwise the last name of the parameter's module (`embed_tokens`, `norm`).
    """
    if block_list is not None and param.startswith(block_list + "."):
        index = param[len(block_list) + 1 :].split(".", 1)[0]
        return f"{block_list.rsplit('.', 1)[-1]}.{index}"
    module = param.rsplit(".", 1)[0] if "." in param else param
    short = module.rsplit(".", 1)[-1]
    return short if taken.setdefault(short, module) == module else module


def build_layer_map(
    params: Iterable[tuple[ParamSpec, bool]], block_list: str | None, embeddings: frozenset[str]
) -> LayerMap:
    """Groups parameters into layers.

    Args:
        params: (parameter, requires_grad) in model order; a tied parameter appears once, under its owner.
        block_list: dotted name of the longest ModuleList, or None.
        embeddings: dotted names of the embedding weights.

    Returns:
        The layers in model order; the frozen part of a layer is its own entry `<layer>.frozen`.
    """
    taken: dict[str, str] = {}
    groups: dict[str, list[ParamSpec]] = {}
    for param, trainable in params:
        name = layer_name(param.name, block_list, taken)
        groups.setdefault(name if trainable else f"{name}.frozen", []).append(param)

    def kind(name: str, members: list[ParamSpec]) -> LayerKind:
        if block_list is not None and members[0].name.startswith(block_list + "."):
            return "block"
        return "embedding" if any(param.name in embeddings for param in members) else "other"

    return LayerMap(
        layers=tuple(
            LayerSpec(
                name=name,
                kind=kind(name, members),
                trainable=not name.endswith(".frozen"),
                params=tuple(members),
            )
            for name, members in groups.items()
        )
    )
