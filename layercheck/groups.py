"""Optimizer groups as values: those of a run, and the same parameters grouped another way. Pure."""

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict

from layercheck.errors import ConfigError
from layercheck.layers import LayerMap

_LABEL = "layer"
"""Key of a group that says whose it is and changes no update."""


class OptimizerGroup(BaseModel):
    """One group of an optimizer: its parameters by name, in its order, and its settings as JSON values."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    names: tuple[str, ...]
    settings: dict[str, Any]


def stock_groups(groups: Sequence[OptimizerGroup], layer_map: LayerMap) -> tuple[OptimizerGroup, ...]:
    """Two groups as without LayerCheck: all matrices, then all vectors, each in the order of the model.

    Raises:
        ConfigError: parameters of one of the two have different settings.
    """
    shapes = {spec.name: spec.shape for layer in layer_map.trainable for spec in layer.params}
    kinds = ([name for name in shapes if (len(shapes[name]) > 1) == matrix] for matrix in (True, False))
    return regrouped(groups, [{"names": names} for names in kinds if names])


def regrouped(
    groups: Sequence[OptimizerGroup], wanted: Iterable[dict[str, Any]]
) -> tuple[OptimizerGroup, ...]:
    """The same parameters in other groups.

    Args:
        groups: those of the run.
        wanted: one dict per new group: `names`, and settings that replace the run's (`weight_decay`).

    Raises:
        ConfigError: a name is unknown, missing or there twice, or a group joins different settings.
    """
    settings = {name: _plain(group.settings) for group in groups for name in group.names}
    made = tuple(_joined(index, dict(group), settings) for index, group in enumerate(wanted))
    placed = [name for group in made for name in group.names]
    twice = [name for name, count in Counter(placed).items() if count > 1]
    if twice:
        raise ConfigError(f"--groups: parameter {twice[0]} is there twice", parameter=twice[0])
    missing = [name for name in settings if name not in set(placed)]
    if missing:
        raise ConfigError(
            f"--groups: {len(missing)} trainable parameters are in no group, the first is {missing[0]}",
            parameter=missing[0],
        )
    return made


def _plain(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in settings.items() if key != _LABEL}


def _joined(index: int, group: dict[str, Any], settings: dict[str, dict[str, Any]]) -> OptimizerGroup:
    names = group.pop("names", None)
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ConfigError(f"--groups: group {index} needs `names`, a list of parameter names")
    unknown = [name for name in names if name not in settings]
    if unknown:
        raise ConfigError(
            f"--groups: group {index} names {unknown[0]}, which is no trainable parameter of this run",
            parameter=unknown[0],
        )
    first = settings[names[0]]
    for name in names:
        for key in first.keys() | settings[name].keys():
            if key not in group and first.get(key) != settings[name].get(key):
                raise ConfigError(
                    f"--groups: group {index} joins {names[0]} with {key}={first.get(key)} and {name} with "
                    f"{key}={settings[name].get(key)}: keep them apart, or give {key} in a groups file",
                    parameter=name,
                )
    return OptimizerGroup(names=tuple(names), settings=first | group)


def split_by_size(sizes: Sequence[int], limit: int) -> list[int]:
    """Lengths of the sub-groups that DeepSpeed makes of one group (`zero_optimization.sub_group_size`).

    Args:
        sizes: elements of each parameter's part on one rank, padding included.
        limit: a sub-group is closed once it has that many elements.
    """
    if limit >= sum(sizes):
        return [len(sizes)]
    lengths, count, elements = [], 0, 0
    for index, size in enumerate(sizes):
        count, elements = count + 1, elements + size
        if elements >= limit or index == len(sizes) - 1:
            lengths.append(count)
            count, elements = 0, 0
    return lengths
