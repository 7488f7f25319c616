"""Layers that are put into an engine one at a time."""

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from layercheck.attempt import start_attempt
from layercheck.errors import LayerCheckError
from layercheck.recovery import install
from layercheck.recovery.fetch import FetchedLayer, FetchedSlice
from layercheck.recovery.restore import restore
from layercheck.tracking.run_log import RunLog
from tests.shards import layer_map, plan_of, shelf

MAP = layer_map({"layers.0": ((3,),), "layers.1": ((3,),)})


class Engine:
    """Keeps what was written, by sub-group: one for each layer."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.layer_map = MAP
        self.sub_groups = tuple(
            SimpleNamespace(index=i, layer=layer.name) for i, layer in enumerate(MAP.layers)
        )
        self.slices = {
            layer.name: (SimpleNamespace(spec=layer.params[0], sub_group=i),)
            for i, layer in enumerate(MAP.layers)
        }
        self.state: list[dict[str, Any]] = [{}, {}]
        self.begun = False

    def begin_install(self) -> None:
        self.begun = True

    def clear_state(self, sub_group: int) -> None:
        self.state[sub_group] = {}

    def room(self, part: Any, key: str) -> torch.Tensor:
        room: torch.Tensor = self.state[part.sub_group].setdefault(key, torch.zeros(3, dtype=self.dtype))
        return room

    def set_scalars(self, part: Any, scalars: dict[str, Any]) -> None:
        self.state[part.sub_group] |= scalars

    def held(self, sub_group: int) -> dict[str, Any]:
        return {
            key: value.tolist() if isinstance(value, torch.Tensor) else value
            for key, value in self.state[sub_group].items()
        }


def fetched(layer: str, step: int, *keys: str) -> FetchedLayer:
    (spec,) = MAP.by_name[layer].params
    tensors = {key: np.full(3, step, np.float32).view(np.uint8) for key in keys}
    scalars = {"step": {"kind": "int", "value": step}} if len(keys) > 1 else {}
    return FetchedLayer(layer, step, {spec.name: FetchedSlice(tensors, dict.fromkeys(keys, "F32"), scalars)})


def replace(engine: Any, version: FetchedLayer) -> None:
    install.clear(engine, version.layer)
    install.put(engine, version)


def test_an_older_version_that_replaces_a_bad_one_leaves_nothing_of_it() -> None:
    engine: Any = Engine()
    replace(engine, fetched("layers.0", 9, "fp32", "exp_avg"))
    replace(engine, fetched("layers.1", 8, "fp32", "exp_avg"))
    replace(engine, fetched("layers.0", 0, "fp32"))
    assert engine.held(0) == {"fp32": [0, 0, 0]}, "step 0 has no moments, and neither has the engine now"
    assert engine.held(1) == {"fp32": [8, 8, 8], "exp_avg": [8, 8, 8], "step": {"kind": "int", "value": 8}}


def test_bytes_go_straight_to_where_they_belong_only_if_their_type_is_the_live_one() -> None:
    (layer, _) = MAP.layers
    exact: Any = Engine()
    room = install.room(exact, exact.slices[layer.name][0], "exp_avg", "F32")
    assert room is not None
    room[:] = np.arange(3, dtype=np.float32).view(np.uint8)
    assert exact.held(0) == {"exp_avg": [0, 1, 2]}
    other: Any = Engine(torch.float64)
    assert install.room(other, other.slices[layer.name][0], "exp_avg", "F32") is None
    replace(other, fetched(layer.name, 7, "exp_avg"))
    assert other.held(0) == {"exp_avg": [7, 7, 7]}
    assert other.state[0]["exp_avg"].dtype == torch.float64


def test_a_plan_without_a_layer_touches_nothing(tmp_path: Any) -> None:
    engine: Any = Engine()
    store = shelf(tmp_path, {"layers.0": ((3,),)})
    plan = plan_of((store.put(store.run.layer_map.layers[0], 1, 1),))
    with pytest.raises(LayerCheckError, match=r"the plan has no layer layers\.1"):
        install.start(engine, plan, "base")
    assert not engine.begun


@pytest.mark.parametrize(
    ("takes", "names"),
    [
        (install.start, {"frozen"}),
        (restore, {"frozen", "bases"}),
        (start_attempt, {"bases"}),
        (RunLog, {"residual"}),
    ],
)
def test_a_setting_that_decides_what_is_restored_cannot_be_left_out(takes: Any, names: set[str]) -> None:
    """A caller that forgot it would restore as if it were off, and nothing would say so."""
    parameters = inspect.signature(takes).parameters
    assert {name for name in names if parameters[name].default is inspect.Parameter.empty} == names
