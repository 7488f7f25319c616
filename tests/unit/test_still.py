"""The alarm for a layer that does not move."""

from layercheck.tracking.still import LEAST_STEPS, StillLayers


def test_a_layer_is_told_once_after_a_whole_rotation_without_movement() -> None:
    still = StillLayers()
    told = [still.observe({"a": 0.0, "b": 1e-30}, 1e-4) for _ in range(2 * LEAST_STEPS)]
    assert told == [()] * (LEAST_STEPS - 1) + [("a",)] + [()] * LEAST_STEPS
    assert still.layers == ("a",)


def test_the_smallest_movement_ends_the_alarm() -> None:
    still = StillLayers()
    for _ in range(LEAST_STEPS + 5):
        still.observe({"a": 0.0}, 1e-4)
    still.observe({"a": 1e-300}, 1e-4)
    assert still.layers == ()


def test_steps_at_learning_rate_zero_say_nothing() -> None:
    still = StillLayers()
    for _ in range(3 * LEAST_STEPS):
        assert still.observe({"a": 0.0}, 0.0) == ()
    assert still.layers == ()
