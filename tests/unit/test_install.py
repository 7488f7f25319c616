"""Layers that are put into an engine one at a time."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from layercheck.errors import LayerCheckError
from layercheck.recovery import install
from layercheck.recovery.fetch import FetchedLayer, FetchedSlice
from tests.shards import layer_map, plan_of, shelf

MAP = layer_map({"layers.0": ((3,),), "layers.1": ((3,),)})


class Engine:
    """Keeps what was written, by sub-group: one for each layer."""

    def __init__(self) -> None:
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

    def write(self, part: Any, tensors: dict[str, Any], scalars: dict[str, Any]) -> None:
        self.state[part.sub_group] |= {key: tensor.tolist() for key, tensor in tensors.items()} | scalars


def fetched(layer: str, step: int, *keys: str) -> FetchedLayer:
    (spec,) = MAP.by_name[layer].params
    tensors = {key: np.full(3, step, np.float32).view(np.uint8) for key in keys}
    scalars = {"step": {"kind": "int", "value": step}} if len(keys) > 1 else {}
    return FetchedLayer(layer, step, {spec.name: FetchedSlice(tensors, dict.fromkeys(keys, "F32"), scalars)})


def test_an_older_version_that_replaces_a_bad_one_leaves_nothing_of_it() -> None:
    engine: Any = Engine()
    install.put(engine, fetched("layers.0", 9, "fp32", "exp_avg"))
    install.put(engine, fetched("layers.1", 8, "fp32", "exp_avg"))
    install.put(engine, fetched("layers.0", 0, "fp32"))
    assert engine.state[0] == {"fp32": [0, 0, 0]}, "step 0 has no moments, and neither has the engine now"
    assert engine.state[1] == {"fp32": [8, 8, 8], "exp_avg": [8, 8, 8], "step": {"kind": "int", "value": 8}}


def test_a_plan_without_a_layer_touches_nothing(tmp_path: Any) -> None:
    engine: Any = Engine()
    store = shelf(tmp_path, {"layers.0": ((3,),)})
    plan = plan_of((store.put(store.run.layer_map.layers[0], 1, 1),))
    with pytest.raises(LayerCheckError, match=r"the plan has no layer layers\.1"):
        install.start(engine, plan)
    assert not engine.begun
