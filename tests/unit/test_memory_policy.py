"""What goes to memory alone: the second threshold, its room, and that all ranks choose alike."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercheck.config import LayerCheckConfig, parse_config
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.errors import ConfigError
from layercheck.tracking.memory import Staged, copies
from layercheck.tracking.policy import LayerFacts, PolicyFacts
from tests.runs import layer_map

NAMES = ("a", "b", "c", "d")


def config(**memory: object) -> LayerCheckConfig:
    return LayerCheckConfig(
        warmup_steps=10,
        warmup_full_every=5,
        max_event_share=0.5,
        memory={"enabled": True, "k_ratio": 0.05, **memory},
    )


def facts(step: int = 50, k0: float | None = 1.0, numel: int = 10) -> PolicyFacts:
    layers = tuple(LayerFacts(name, "block", numel, 0.0, 40, 40, stagger=0.05) for name in NAMES)
    return PolicyFacts(
        step=step, lr=1.0, k0=k0, lr_ref=1.0, k_factor=1.0, margin=5, newest_full=10, event_taken=False,
        layers=layers,
    )  # fmt: skip


def staged(**moved: float) -> Staged:
    return Staged({name: moved.get(name, 0.0) for name in NAMES}, dict.fromkeys(NAMES, 40))


def names(decision: PersistDecision) -> list[str]:
    return [write.layer for write in decision.writes]


NONE = PersistDecision(50)


def test_the_furthest_go_first_up_to_the_share_of_an_event() -> None:
    books = staged(a=0.06, b=0.2, c=0.051, d=0.05)
    found = copies(facts(), books, NONE, config(), 0.0)
    assert names(found) == ["b", "a"], "half of the state; c has to wait, d is not above its threshold"
    assert {(write.reason, write.base) for write in found.writes} == {("memory", None)}
    assert found.writes[0].threshold == pytest.approx(0.05)
    assert found.writes[0].age == 10


def test_one_layer_goes_whatever_its_size() -> None:
    assert names(copies(facts(numel=10**9), staged(a=1.0), NONE, config(), 0.0)) == ["a"]


def test_ratio_0_takes_all_layers_at_every_step_also_before_k_is_known() -> None:
    assert names(copies(facts(k0=None), staged(), NONE, config(k_ratio=0), 0.0)) == list(NAMES)


def test_what_goes_to_the_storage_is_in_memory_on_its_way() -> None:
    chosen = PersistDecision(
        50, (LayerWrite("a", "drift", 1, 1, 1), LayerWrite("b", "residual", 1, 1, 1, base=(4, 1)))
    )
    assert names(copies(facts(), staged(), chosen, config(k_ratio=0), 0.0)) == ["b", "c", "d"]


@pytest.mark.parametrize(("step", "backlog"), [(10, 0.0), (50, 1.0)])
def test_nothing_in_the_warm_up_nor_while_a_rank_is_behind(step: int, backlog: float) -> None:
    found = copies(facts(step), staged(a=9.0), PersistDecision(step), config(k_ratio=0), backlog)
    assert (found.step, found.writes) == (step, ())


def test_without_k_nothing_is_due() -> None:
    assert copies(facts(k0=None), staged(a=inf), NONE, config(), 0.0).writes == ()


@given(
    moves=st.lists(st.lists(st.floats(0, 0.2), min_size=4, max_size=4), min_size=1, max_size=60),
    lag=st.integers(0, 1),
)
def test_no_layer_is_forgotten_whatever_moves(moves: list[list[float]], lag: int) -> None:
    """Each layer's movement since its copy stays below its threshold and what waits for room."""
    books, truth = staged(), dict.fromkeys(NAMES, 0.0)
    settings = config()
    for step, deltas in enumerate(moves, start=50):
        for name, delta in zip(NAMES, deltas, strict=True):
            truth[name] += delta
        if lag == 0 or step > 50:
            told = moves[step - 50 - lag]
            books.observe(DriftReport(step - lag, dict(zip(NAMES, told, strict=True)), 1.0))
        found = copies(replace(facts(), step=step), books, PersistDecision(step), settings, 0.0)
        books.take(step, names(found))
        truth |= dict.fromkeys(names(found), 0.0)
        assert len(found.writes) <= 2
        for name in NAMES:
            ours, late = books.moved[name], deltas[NAMES.index(name)] if lag else 0.0
            assert ours <= truth[name] + 1e-9, "a copy holds its own step"
            assert truth[name] <= ours + late + 1e-9
        if len(found.writes) < 2:
            assert max(books.moved.values()) <= 0.05 + 1e-9


def test_an_attempt_begins_with_what_it_got_from_memory() -> None:
    books = Staged.since(7, layer_map(), None)
    assert set(books.moved.values()) == {inf}
    assert set(books.step.values()) == {7}


@pytest.mark.parametrize(
    "memory", [{"k_ratio": 1.0}, {"k_ratio": -0.1}, {"budget_gb": 0}, {"settle_s": 0}, {"unknown": 1}]
)
def test_settings_that_cannot_be_are_refused_by_name(memory: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=rf"memory\.{next(iter(memory))}"):
        parse_config({"memory": memory})


def test_off_is_the_default() -> None:
    assert not LayerCheckConfig().memory.enabled


@pytest.mark.parametrize("numel", [[30, *[6] * 12, 1], [25, *[20] * 3, 1], [10] * 28])
def test_at_the_default_ratio_a_dead_worker_costs_less_than_five_steps(numel: list[int]) -> None:
    """K in 100 steps, as by default; layers that move at 0.7 to 1.3 times that rate."""
    settings = LayerCheckConfig(memory={"enabled": True})
    names = [str(number) for number in range(len(numel))]
    layers = tuple(LayerFacts(name, "block", n, 0.0, 0, 0) for name, n in zip(names, numel, strict=True))
    rates = {name: 0.01 * (0.7 + 0.6 * (number % 5) / 4) for number, name in enumerate(names)}
    books = Staged(dict.fromkeys(names, 0.0), dict.fromkeys(names, 200))
    lost = []
    for step in range(201, 501):
        books.observe(DriftReport(step, rates, 1.0))
        found = copies(replace(facts(step), layers=layers), books, PersistDecision(step), settings, 0.0)
        books.take(step, [write.layer for write in found.writes])
        ages = [n * (step - books.step[name]) for name, n in zip(names, numel, strict=True)]
        lost.append(sum(ages) / sum(numel))
    assert max(lost[50:]) <= 5.0, f"mean {sum(lost) / len(lost):.2f}, max {max(lost[50:]):.2f}"
