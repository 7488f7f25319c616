"""The line of a recovery names the true smallest and largest age."""

import pytest

from layercheck.receipt import Receipt
from layercheck.recovery.restore import in_words


def receipt(**ages: int) -> Receipt:
    trainable = [age for name, age in ages.items() if name != "frozen"]
    layer = {"step": 0, "attempt": 1, "lost": 0, "reason": "drift", "nbytes": 1, "fallback": False}
    layer |= {"residual": None}
    names = {name: "layers.0.frozen" if name == "frozen" else name for name in ages}
    return Receipt(
        attempt=2, mode="composite", t_fail=60, t_fail_source="journal", resume_step=61, world_size=2,
        max_age=max(trainable), weighted_age=4.0, lost_steps=4.0, nbytes=3,
        layers=tuple(layer | {"name": names[name], "age": age} for name, age in ages.items()),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("ages", "words"),
    [
        ({"a": 0, "b": 9, "c": 4}, "with layers 0 to 9 steps old, "),
        ({"a": 3, "b": 9, "c": 4}, "with layers 3 to 9 steps old, "),
        ({"a": 60, "b": 60}, "with all layers 60 steps old, "),
        ({"a": 0}, "with all layers 0 steps old, "),
        ({"a": 3, "b": 9, "frozen": 60}, "with layers 3 to 9 steps old, "),
        ({"a": 3, "b": 9, "frozen": 1}, "with layers 3 to 9 steps old, "),
    ],
)
def test_ages_are_those_of_the_youngest_and_the_oldest_layer_that_trains(ages: dict[str, int], words: str):
    assert words in in_words(receipt(**ages))
