"""The rule itself, one fact at a time, and its promises over whole simulated runs."""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.decision import PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.errors import ConfigError
from layercheck.layers import LayerMap
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.policy import LayerFacts, PolicyFacts, decide, full_anchor, threshold
from tests.unit.simulated_run import SimulatedRun, config, layer, transformer

CONFIG = config()


def fact(name: str, drift: float = 0.0, selected: int = 300, **more: object) -> LayerFacts:
    known = {"kind": "block", "numel": 100, "committed": selected} | more
    return LayerFacts(name=name, drift=drift, selected=selected, **known)


def facts(*layers: LayerFacts, step: int = 310, **more: object) -> PolicyFacts:
    """After the warm-up, K = 1, ten layers of 100 elements unless told otherwise."""
    idle = tuple(fact(f"idle.{index}") for index in range(10 - len(layers)))
    known = {
        "lr": 1e-4,
        "k0": 1.0,
        "lr_ref": 1e-4,
        "k_factor": 1.0,
        "margin": 5,
        "newest_full": 200,
        "event_taken": False,
    }
    return PolicyFacts(step=step, layers=layers + idle, **(known | more))


def names(decision: PersistDecision) -> list[str]:
    return [write.layer for write in decision.writes]


# ------------------------------------------------------------------------------------------------------- rule


def test_a_layer_is_due_only_above_its_threshold_never_at_it():
    assert names(decide(facts(fact("a", drift=1.0)), CONFIG)) == []
    decision = decide(facts(fact("a", drift=1.0001)), CONFIG)
    assert [(w.layer, w.reason, w.threshold, w.age) for w in decision.writes] == [("a", "drift", 1.0, 10)]


def test_the_threshold_follows_the_learning_rate_down_to_a_floor():
    known = facts(fact("a"), lr=5e-5)
    assert threshold(known.layers[0], known, CONFIG) == pytest.approx(0.5)
    known = replace(known, lr=0.0)
    assert threshold(known.layers[0], known, CONFIG) == pytest.approx(0.01)


def test_the_threshold_of_an_embedding_is_larger_by_its_factor():
    known = facts(fact("a"), fact("e", kind="embedding"), k_factor=0.5)
    assert threshold(known.layers[0], known, CONFIG) == pytest.approx(0.5)
    assert threshold(known.layers[1], known, CONFIG) == pytest.approx(5.0)


def test_a_factor_by_name_pattern_takes_the_place_of_the_one_by_kind_and_the_first_that_fits_counts():
    by_name = config(k0_factors={"layers.0": 2.0, "layers.*": 3.0, "*norm": 0.5, "embed*": 4.0})
    known = facts(
        fact("layers.0"), fact("layers.1"), fact("norm"), fact("embed_tokens", kind="embedding"), fact("head")
    )
    limits = [threshold(layer, known, by_name) for layer in known.layers[:5]]
    assert limits == pytest.approx([2.0, 3.0, 0.5, 4.0, 1.0])


def test_a_pattern_that_fits_no_layer_is_refused_naming_the_layers():
    with pytest.raises(ConfigError, match=r"'layer\.0' fits no trainable layer of embed_tokens, layers\.0"):
        Ledger.fresh(transformer(1), config(k0_factors={"layer.0": 2.0}))


def test_a_smaller_factor_makes_a_layer_be_written_more_often():
    run = steady(blocks=4, steps=1200, k0_factors={"layers.0": 0.25})
    written = Counter(write.layer for one in run.selective() for write in one.writes)
    assert written["layers.0"] > 2 * max(written[f"layers.{index}"] for index in (1, 2, 3)) * 0.8


def test_the_layer_that_drifted_most_over_its_threshold_goes_first():
    room_for_one = config(max_event_share=0.1)
    due = (fact("a", drift=1.5), fact("e", drift=11.0, kind="embedding"), fact("b", drift=2.0))
    assert names(decide(facts(*due), room_for_one)) == ["b"]


def test_due_layers_fill_an_event_up_to_its_share_of_the_state():
    due = tuple(fact(f"l{index}", drift=2.0) for index in range(6))
    assert names(decide(facts(*due), config(max_event_share=0.35))) == ["l0", "l1", "l2"]


def test_a_layer_larger_than_the_share_goes_alone():
    big = fact("big", drift=5.0, numel=900)
    assert names(decide(facts(big, fact("a", drift=3.0)), config(max_event_share=0.15))) == ["big"]


def test_a_layer_still_in_flight_is_not_written_again_for_its_drift():
    assert names(decide(facts(fact("a", drift=3.0, in_flight=True)), CONFIG)) == []


def test_a_layer_still_in_flight_is_written_again_at_its_age_limit():
    old = fact("a", selected=290, committed=280, in_flight=True)
    assert names(decide(facts(old, step=685), config(full_every=0))) == ["a"]


def test_a_layer_is_due_by_age_its_margin_before_s_max():
    fresh = config(full_every=0)
    old = fact("a", selected=250)
    assert names(decide(facts(old, step=250 + 394, margin=5), fresh)) == []
    decision = decide(facts(old, step=250 + 395, margin=5), fresh)
    assert [(write.layer, write.reason) for write in decision.writes] == [("a", "age")]


def test_an_overdue_layer_is_due_without_drift_and_reports_its_threshold():
    (write,) = decide(facts(fact("a", overdue=True)), CONFIG).writes
    assert (write.reason, write.drift) == ("drift", 1.0)


def test_layers_of_one_deadline_start_early_enough_to_go_one_event_a_step():
    """Ten layers, room for one a step: the first must go nine steps before the common deadline."""
    one = config(max_event_share=0.1, full_every=0)
    same = tuple(fact(f"l{index}", selected=300) for index in range(10))
    deadline = 300 + 400 - 5
    assert names(decide(facts(*same, step=deadline - 10), one)) == []
    assert names(decide(facts(*same, step=deadline - 9), one)) == ["l0"]


def test_a_layer_at_its_limit_is_never_put_off_however_full_the_event():
    one = config(max_event_share=0.1, full_every=0)
    same = tuple(fact(f"l{index}", selected=300) for index in range(10))
    assert len(decide(facts(*same, step=695), one).writes) == 10


def test_without_a_calibrated_threshold_only_age_selects():
    waiting = facts(fact("a", drift=1e9), fact("b", selected=200), step=595, k0=None)
    decision = decide(waiting, config(full_every=0))
    assert [(write.layer, write.reason, write.threshold) for write in decision.writes] == [("b", "age", 0.0)]


def test_nothing_is_selected_twice_at_one_step():
    assert decide(facts(fact("a", drift=9.0), event_taken=True), CONFIG).writes == ()


# ------------------------------------------------------------------------------------------------ full events


def test_the_first_step_takes_everything_and_waits_for_its_commit():
    new = (fact("a", selected=-1), fact("b", selected=-1))
    known = PolicyFacts(
        1e-4, None, None, 1.0, step=0, margin=5, newest_full=-1, event_taken=False, layers=new,
        frozen=("a.frozen",),
    )  # fmt: skip
    decision = decide(known, CONFIG)
    assert names(decision) == ["a", "b", "a.frozen"]
    assert {write.reason for write in decision.writes} == {"full"}
    assert decision.must_wait


def test_full_events_follow_the_warm_up_then_the_long_schedule():
    every = config(warmup_steps=7, warmup_full_every=3, full_every=10, s_max=100, target_interval=20)
    anchors = [full_anchor(facts(step=step), every) for step in range(30)]
    assert sorted(set(anchors)) == [0, 3, 6, 7, 17, 27]
    assert all(anchor <= step for step, anchor in enumerate(anchors))


def test_no_layer_is_selected_by_drift_inside_the_warm_up():
    assert names(decide(facts(fact("a", drift=9.0, selected=100), step=150, newest_full=100), CONFIG)) == []


def test_a_lost_full_event_is_owed_again_at_once():
    decision = decide(facts(fact("a", drift=9.0), newest_full=100, step=203), CONFIG)
    assert {write.reason for write in decision.writes} == {"full"}
    assert len(decision.writes) == 10


def test_i11_a_frozen_layer_is_written_in_the_first_full_event_only():
    trained = transformer(2).layers
    frozen = LayerMap(layers=(*trained, layer("x.frozen", 500, "other", trainable=False)))
    run = SimulatedRun(frozen, config(warmup_steps=20, warmup_full_every=10), lambda step, name: 1e-5)
    run.run(0, 100)
    assert [one.step for one in run.decisions if "x.frozen" in names(one)] == [0]


# ------------------------------------------------------------------------------------------------------ bound


def test_i1_ranks_wait_when_one_more_step_would_pass_s_max():
    committed_at_10 = fact("a", selected=300, committed=10)
    assert not decide(facts(committed_at_10, step=409), CONFIG).must_wait
    assert decide(facts(committed_at_10, step=410), CONFIG).must_wait


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
def test_i1_no_layer_grows_older_than_s_max_unless_the_ranks_were_told_to_wait(seed: int):
    draw = random.Random(seed)
    s_max = draw.choice([8, 20, 60])
    limits = config(
        s_max=s_max, target_interval=s_max / 2, warmup_steps=12, warmup_full_every=max(1, s_max // 3)
    )
    slowest, loss = draw.choice([1, 3, s_max]), draw.choice([0.0, 0.2])
    rates = [10 ** draw.uniform(-7, -3) for _ in range(8)]
    run = SimulatedRun(
        transformer(draw.choice([1, 5, 12])),
        limits,
        lambda step, name: rates[sum(name.encode()) % 8] * draw.random(),
        delay=lambda step: draw.randint(0, slowest),
        loses=lambda step: step > 0 and draw.random() < loss,
    )
    run.run(0, 5 * s_max)
    assert max(run.max_ages) <= s_max
    assert run.blocked_at is None or loss > 0


def test_i1_fast_storage_never_makes_the_ranks_wait():
    run = SimulatedRun(transformer(8), config(), lambda step, name: 3e-5, delay=lambda step: 3)
    run.run(0, 1500)
    waiting_for_the_first_commit = 3
    assert run.waits == waiting_for_the_first_commit


# ----------------------------------------------------------------------------------------------- one decision


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32 - 1), mode=st.sampled_from(["drift", "round_robin", "random", "full"]))
def test_i3_two_ranks_that_hear_the_same_reports_take_the_same_decisions(seed: int, mode: str):
    draw = random.Random(seed)
    known = transformer(4)
    same = config(selection=mode, warmup_steps=6, warmup_full_every=3, target_interval=5, s_max=40)
    ranks = [Ledger.fresh(known, same), Ledger.fresh(known, same)]
    committed = -1
    for step in range(60):
        lost = tuple(s for s in range(committed + 1, step) if draw.random() < 0.1)
        committed = step - 2 if draw.random() < 0.5 else committed
        report = DriftReport(step, {one.name: draw.random() for one in known.layers}, 1e-4, committed, lost)
        decisions = []
        for rank in ranks:
            rank.observe(report)
            decisions.append(decide(rank.facts(step, report.lr), same))
            rank.select(decisions[-1])
        assert decisions[0] == decisions[1]
    assert ranks[0].to_state() == ranks[1].to_state()


def test_i3_the_random_selection_is_the_same_in_every_process():
    """Python's own hash differs between processes; what was drawn here once must be drawn by every rank."""
    known = facts(*(fact(f"l{index}") for index in range(10)))
    drawn = [
        names(
            decide(
                replace(known, step=step), config(selection="random", target_interval=5, max_event_share=1)
            )
        )
        for step in range(310, 314)
    ]
    assert drawn == DRAWN


DRAWN = [["l1"], ["l4"], ["l2", "l9", "l3", "l1"], ["l1", "l4", "l0"]]


# ------------------------------------------------------------------------------------------------ whole runs


def steady(blocks: int = 28, steps: int = 3000, **settings_: object) -> SimulatedRun:
    """Constant rates that differ by layer up to 1:3, noise of a step 30 %, commits after two steps."""
    draw = random.Random(7)
    known = transformer(blocks)
    rates = {one.name: 3e-5 * draw.uniform(0.5, 1.5) for one in known.layers}
    run = SimulatedRun(
        known,
        config(full_every=0, **settings_),
        lambda step, name: rates[name] * draw.uniform(0.7, 1.3),
        delay=lambda step: 2,
    )
    return run.run(0, 200 + steps)


@pytest.fixture(scope="module")
def run() -> SimulatedRun:
    return steady()


def test_the_mean_interval_is_the_target(run: SimulatedRun):
    total = sum(one.numel for one in run.layer_map.layers)
    interval = 3000 * total / run.selective_numel()
    assert interval == pytest.approx(run.config.target_interval, rel=0.15)


def test_most_layer_writes_come_from_drift(run: SimulatedRun):
    reasons = Counter(write.reason for one in run.selective() for write in one.writes)
    assert reasons["drift"] >= 0.8 * sum(reasons.values())
    assert not run.ledger.reasons.age_dominates


def test_no_event_is_larger_than_its_share_or_one_layer(run: SimulatedRun):
    total = sum(one.numel for one in run.layer_map.layers)
    for one in run.selective():
        share = sum(run.layer_map.by_name[write.layer].numel for write in one.writes) / total
        assert len(one.writes) == 1 or share <= run.config.max_event_share


def test_the_weighted_age_stays_level_because_writes_are_spread(run: SimulatedRun):
    ages = run.weighted_ages[600:]
    assert max(ages) <= 1.5 * sum(ages) / len(ages)


def test_layers_of_equal_drift_do_not_come_due_together_after_the_base():
    run = SimulatedRun(transformer(28), config(), lambda step, name: 3e-5).run(0, 330)
    first = {write.layer: one.step for one in reversed(run.selective()) for write in one.writes}
    blocks = [first[f"layers.{index}"] for index in range(28)]
    assert blocks == sorted(blocks)
    assert blocks[-1] - blocks[0] > run.config.target_interval / 2
    assert len(set(blocks)) > 20


def test_a_lost_base_is_written_again_and_selection_goes_on():
    short = config(warmup_steps=20, warmup_full_every=10, target_interval=10)
    run = SimulatedRun(transformer(4), short, lambda step, name: 3e-5, loses=lambda step: step == 20)
    run.run(0, 60)
    full = [one.step for one in run.decisions if one.writes and one.writes[0].reason == "full"]
    assert full == [0, 10, 20, 21]
    assert len(run.selective()) > 10


@pytest.mark.parametrize("mode", ["round_robin", "random"])
def test_other_selections_write_about_the_same_bytes(mode: str):
    run = steady(steps=1500, selection=mode)
    total = sum(one.numel for one in run.layer_map.layers)
    assert 1500 * total / run.selective_numel() == pytest.approx(100, rel=0.2)


def test_the_full_selection_writes_everything_at_the_target_interval():
    run = steady(blocks=2, steps=450, selection="full")
    assert [one.step for one in run.decisions if one.writes] == [0, 100, 200, 300, 400, 500, 600]


def test_a_threshold_that_never_fires_is_noticed():
    run = steady(blocks=4, steps=800, k0=1e6)
    assert run.ledger.reasons.age_dominates
    assert max(run.max_ages) <= run.config.s_max
