"""The parameters of a run in other optimizer groups."""

from typing import Any

import pytest

from layercheck.errors import ConfigError
from layercheck.groups import OptimizerGroup, regrouped, split_by_size, stock_groups
from layercheck.layers import LayerMap
from tests.shards import layer_map

MAP: LayerMap = layer_map({"layers.0": ((4, 4), (4,)), "layers.1": ((4, 4), (4,)), "norm": ((4,),)})


def group(layer: str, *names: str, **settings: Any) -> OptimizerGroup:
    return OptimizerGroup(names=names, settings={"lr": 0.1, "betas": [0.9, 0.99], "layer": layer} | settings)


GROUPS = (
    group("layers.0", "layers.0.0", weight_decay=0.1),
    group("layers.0", "layers.0.1", weight_decay=0.0),
    group("layers.1", "layers.1.0", weight_decay=0.1),
    group("layers.1", "layers.1.1", weight_decay=0.0),
    group("norm", "norm.0", weight_decay=0.0),
)


def test_stock_groups_are_the_matrices_and_the_vectors_in_model_order() -> None:
    matrices, vectors = stock_groups(GROUPS, MAP)
    assert (matrices.names, vectors.names) == (
        ("layers.0.0", "layers.1.0"),
        ("layers.0.1", "layers.1.1", "norm.0"),
    )
    assert matrices.settings == {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.1}
    assert vectors.settings["weight_decay"] == 0.0


def test_settings_that_differ_are_joined_only_when_the_file_says_which() -> None:
    names = list(MAP.layer_of)
    with pytest.raises(
        ConfigError, match=r"group 0 joins layers\.0\.0 with weight_decay=0\.1 and layers\.0\.1"
    ):
        regrouped(GROUPS, [{"names": names}])
    (one,) = regrouped(GROUPS, [{"names": names, "weight_decay": 0.05}])
    assert one.names == tuple(names)
    assert one.settings == {"lr": 0.1, "betas": [0.9, 0.99], "weight_decay": 0.05}


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        ([{"names": ["layers.0.0", "layers.9.0"]}], r"group 0 names layers\.9\.0, which is no trainable"),
        ([{"names": ["layers.0.0"]}], r"4 trainable parameters are in no group, the first is layers\.0\.1"),
        ([{"names": [name]} for name in (*MAP.layer_of, "norm.0")], r"norm\.0 is there twice"),
        ([{"weight_decay": 0.1}], "group 0 needs `names`"),
        ([{"names": "norm.0"}], "group 0 needs `names`"),
        ([{"names": []}], "group 0 needs `names`"),
    ],
)
def test_a_wrong_grouping_is_one_error_that_names_the_parameter(
    wanted: list[dict[str, Any]], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        regrouped(GROUPS, wanted)


@pytest.mark.parametrize(
    ("sizes", "limit", "lengths"),
    [
        ([5, 5, 5], 100, [3]),
        ([5, 5, 5], 15, [3]),
        ([5, 5, 5], 10, [2, 1]),
        ([5, 5, 5], 1, [1, 1, 1]),
        ([9], 3, [1]),
    ],
)
def test_a_group_is_cut_as_deepspeed_cuts_it(sizes: list[int], limit: int, lengths: list[int]) -> None:
    assert split_by_size(sizes, limit) == lengths
