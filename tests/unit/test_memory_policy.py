"""What goes to memory alone: the second threshold, its room, and that all ranks choose alike."""

from dataclasses import replace
from math import inf
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layercheck.attempt import Attempt
from layercheck.config import LayerCheckConfig, parse_config
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.errors import ConfigError
from layercheck.tracking.memory import Staged, copies
from layercheck.tracking.policy import LayerFacts, PolicyFacts
from tests.runs import layer_map

NAMES = ("a", "b", "c", "d")


def config(share: float = 0.5, **memory: object) -> LayerCheckConfig:
    return LayerCheckConfig(
        warmup_steps=10,
        warmup_full_every=5,
        max_event_share=share,
        memory={"enabled": True, "k_ratio": 0.05, **memory},
    )


def facts(step: int = 50, k0: float | None = 1.0, numel: int = 10) -> PolicyFacts:
    layers = tuple(LayerFacts(name, "block", numel, 0.0, 40, 40, stagger=0.05) for name in NAMES)
    return PolicyFacts(
        step=step, lr=1.0, k0=k0, lr_ref=1.0, k_factor=1.0, margin=5, newest_full=10, event_taken=False,
        layers=layers,
    )  # fmt: skip


def staged(step: int = 40, **moved: float) -> Staged:
    return Staged({name: moved.get(name, 0.0) for name in NAMES}, dict.fromkeys(NAMES, step))


def names(decision: PersistDecision) -> list[str]:
    return [write.layer for write in decision.writes]


NONE = PersistDecision(50)


def test_the_furthest_go_first_up_to_the_share_of_an_event() -> None:
    books = staged(a=0.06, b=0.2, c=0.051, d=0.05, step=49)
    found = copies(facts(), books, NONE, config(), 0.0)
    assert names(found) == ["b", "a"], "half of the state; c has to wait, d is not above its threshold"
    assert {(write.reason, write.base) for write in found.writes} == {("memory", None)}
    assert found.writes[0].threshold == pytest.approx(0.05)
    assert found.writes[0].age == 10


def test_a_copy_that_is_old_goes_though_its_layer_hardly_moved() -> None:
    """At a ratio of 0.05 and a target of 100 steps: after 7.5 steps."""
    books = staged(step=43, d=0.0501)
    books.step["b"] = 42
    assert names(copies(facts(), books, NONE, config(), 0.0)) == ["b", "d"]


def test_steps_at_which_a_rank_was_behind_lend_their_room_to_the_next_copies() -> None:
    books = staged(step=49, a=0.2, b=0.1, c=0.09, d=0.08)
    found = []
    for behind in (True, False, False, True, True, True, True, True):
        found.append(
            len(copies(facts(numel=10), books, NONE, config(share=0.25), 1.0 if behind else 0.0).writes)
        )
        books.copied(NONE, behind)
    assert found == [0, 2, 1, 0, 0, 0, 0, 0]
    books.copied(NONE, False)
    assert books.waited == 0
    books.waited = 9
    assert len(copies(facts(), books, NONE, config(share=0.05), 0.0).writes) == 1, (
        "four shares at most: 8 of 40"
    )


def test_an_attempt_keeps_the_books_of_what_it_copies_and_of_the_steps_that_it_waits() -> None:
    books = staged(step=49, a=0.2, b=0.1)
    ledger = SimpleNamespace(lr=1.0, facts=lambda step, lr: facts(step))
    attempt: Any = SimpleNamespace(staged=books, ledger=ledger, backlog=1.0)
    assert Attempt.for_memory(attempt, NONE, config()).writes == ()
    assert (books.waited, books.moved["a"]) == (1, 0.2)
    attempt.backlog = 0.0
    assert names(Attempt.for_memory(attempt, NONE, config())) == ["a", "b"]
    assert (books.waited, books.moved["a"], books.step["b"]) == (0, 0.0, 50)


def test_one_layer_goes_whatever_its_size() -> None:
    assert names(copies(facts(numel=10**9), staged(step=49, a=1.0), NONE, config(), 0.0)) == ["a"]


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


QWEN2_05B, QWEN2_7B = (136, [14.9] * 24), (545, [233.0] * 28)
"""Parameters in millions of the embedding, and of each block."""


@pytest.mark.parametrize(("embedding", "blocks"), [QWEN2_05B, QWEN2_7B, (0.4, [0.4] * 6)])
@pytest.mark.parametrize("rate", [1.0, 0.1])
@pytest.mark.parametrize("lag", [0, 1])
def test_at_the_default_ratio_a_dead_worker_costs_less_than_five_steps(
    embedding: float, blocks: list[float], rate: float, lag: int
) -> None:
    """K in 100 steps, 10 times as large for embeddings, by default; copies of a step are whole at the next.

    Blocks move at 0.7 to 1.3 times the mean rate, the embedding at `rate` times it. With a lag the copies of
    a step are seen to be whole at the one after the next.
    """
    settings = LayerCheckConfig(memory={"enabled": True})
    numel = {"embed": embedding} | {str(number): size for number, size in enumerate(blocks)}
    layers = tuple(
        LayerFacts(name, "embedding" if name == "embed" else "block", int(1000 * size), 0.0, 0, 0)
        for name, size in numel.items()
    )
    rates = {name: 0.01 * (0.7 + 0.6 * (number % 5) / 4) for number, name in enumerate(numel)}
    rates["embed"] = 0.01 * rate
    books = Staged(dict.fromkeys(numel, 0.0), dict.fromkeys(numel, 200))
    lost = []
    for step in range(201, 501):
        whole = dict(books.step)
        books.observe(DriftReport(step - lag, rates, 1.0))
        is_behind = bool(lag and step % 2)
        found = copies(replace(facts(step), layers=layers), books, NONE, settings, float(is_behind))
        books.copied(found, is_behind)
        lost.append(sum(size * (step - whole[name]) for name, size in numel.items()) / sum(numel.values()))
    assert sum(lost[50:]) / len(lost[50:]) <= 5.0
    assert max(lost[50:]) <= 7.0
