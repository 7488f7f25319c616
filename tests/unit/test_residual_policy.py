"""When a residual is due, and what becomes of it in the books of the ranks."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.config import parse_config
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.errors import ConfigError
from layercheck.layers import LayerStep
from layercheck.manifest import LayerPlan, RecoveryPlan
from layercheck.tracking.ledger import Ledger
from layercheck.tracking.policy import LayerFacts, PolicyFacts, ResidualFacts, decide
from layercheck.tracking.unsaved import Unsaved
from tests.unit.simulated_run import SimulatedRun, config, transformer

MAP = transformer(6)
ON = {"enabled": True, "k_ratio": 0.1, "bits": 8, "block": 64}
CONFIG = config(residual=ON)
BASE = (300, 0)


def fact(name: str, moved: float | None, drift: float = 0.0, **more: object) -> LayerFacts:
    residual = None if moved is None else ResidualFacts(BASE, moved, is_first=False)
    known = {"kind": "block", "numel": 100, "selected": 300, "committed": 300} | more
    return LayerFacts(name=name, drift=drift, residual=residual, **known)  # type: ignore[arg-type]


def facts(*layers: LayerFacts) -> PolicyFacts:
    """After the warm-up, K = 1, ten layers of 100 elements."""
    idle = tuple(fact(f"idle.{index}", 0.0) for index in range(10 - len(layers)))
    return PolicyFacts(
        step=310, lr=1e-4, k0=1.0, lr_ref=1e-4, k_factor=1.0, margin=5, newest_full=200, event_taken=False,
        layers=layers + idle,
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------- the rule


def test_a_residual_is_due_above_its_part_of_k_never_at_it():
    assert decide(facts(fact("a", 0.1)), CONFIG).writes == ()
    (write,) = decide(facts(fact("a", 0.1001)), CONFIG).writes
    assert write == LayerWrite("a", "residual", 0.1001, pytest.approx(0.1), 10, BASE)
    assert decide(facts(fact("a", 0.1001)), CONFIG).versions == ()


def test_none_is_taken_where_they_are_off_excluded_or_impossible():
    due = facts(fact("a", 5.0), fact("b", None))
    assert decide(due, config()).writes == ()
    assert decide(due, config(residual=ON | {"exclude": ["a*"]})).writes == ()
    assert [write.layer for write in decide(due, CONFIG).residuals] == ["a"]
    assert decide(replace(due, event_taken=True), CONFIG).writes == ()
    assert decide(replace(due, step=150, newest_full=100), CONFIG).writes == (), "none in the warm-up"


def test_a_version_needs_no_residual_beside_it():
    decision = decide(facts(fact("a", 5.0, drift=2.0), fact("b", 0.2)), CONFIG)
    assert [(write.layer, write.reason) for write in decision.writes] == [("a", "drift"), ("b", "residual")]


def test_the_first_one_after_a_full_event_is_staggered_the_next_ones_are_not():
    first = fact("a", 0.06, stagger=0.5)
    assert first.residual is not None
    first = replace(first, residual=replace(first.residual, is_first=True))
    assert decide(facts(first), CONFIG).residuals
    assert not decide(facts(fact("a", 0.06, stagger=0.5)), CONFIG).residuals


def test_no_step_copies_more_than_max_event_share_of_the_state():
    """A residual is copied as fp32 weights, 4 of the 12 bytes of a version, however few bits it becomes."""
    everything = facts(*(fact(f"l{index}", 1.0) for index in range(10)))
    for bits in (8, 4):
        writes = decide(everything, config(residual=ON | {"bits": bits}, max_event_share=0.15)).writes
        copied = sum(100 * 4 for _ in writes)
        assert copied <= 0.15 * 12 * 1000 < copied + 400


@settings(max_examples=150, deadline=None)
@given(
    moved=st.lists(st.floats(0, 2), min_size=10, max_size=10),
    drift=st.lists(st.floats(0, 2), min_size=10, max_size=10),
    share=st.floats(0.01, 1),
    bits=st.sampled_from([4, 8]),
)
def test_residuals_take_the_furthest_first_and_only_the_room_that_versions_left(
    moved: list[float], drift: list[float], share: float, bits: int
):
    layers = tuple(fact(f"l{i}", m, drift=d) for i, (m, d) in enumerate(zip(moved, drift, strict=True)))
    settings_ = config(residual=ON | {"bits": bits}, max_event_share=share)
    decision = decide(facts(*layers), settings_)
    assert decision.versions == decide(facts(*layers), config(max_event_share=share)).writes
    cost = 100 * 4 / 12
    used = 100 * len(decision.versions) + cost * len(decision.residuals)
    assert used <= share * 1000 + 1e-6 or len(decision.writes) == 1
    taken = {write.layer for write in decision.writes}
    due = sorted((m for i, m in enumerate(moved) if m > 0.1 and f"l{i}" not in {
        write.layer for write in decision.versions
    }), reverse=True)  # fmt: skip
    assert [write.drift for write in decision.residuals] == due[: len(decision.residuals)]
    if len(decision.residuals) < len(due):
        assert taken, "what is due is only put off by others"
        assert used + cost > share * 1000 - 1e-6
    assert all(write.base == BASE for write in decision.residuals)


# -------------------------------------------------------------------------------------------- over whole runs


def simulated(residual: dict[str, object] = ON, share: float = 0.3, **more: object) -> SimulatedRun:
    settings_ = config(
        warmup_steps=10,
        warmup_full_every=5,
        s_max=200,
        target_interval=50,
        max_event_share=share,
        residual=residual,
    )
    return SimulatedRun(MAP, settings_, lambda step, name: 0.01 * (1 + len(name) % 3), **more)  # type: ignore[arg-type]


def test_residuals_shorten_what_a_failure_loses_and_leave_the_versions_alone():
    with_residuals, without = simulated(), simulated({})
    lost = {True: 0.0, False: 0.0}
    for step in range(400):
        for run in (with_residuals, without):
            run.step(step)
            lost[run is without] += run.ledger.unsaved.lost_steps(step) if step > 50 else 0.0
    assert lost[False] < 0.45 * lost[True], "with a tenth of K; embeddings, with ten times K, weigh a quarter"
    versions = [[write.layer for write in one.versions] for one in with_residuals.decisions]
    assert versions == [[write.layer for write in one.versions] for one in without.decisions]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 9), st.integers(2, 13), st.integers(0, 1))
def test_each_base_is_committed_and_nothing_of_the_layer_is_in_flight(delay: int, every: int, at: int):
    run = simulated(
        delay=lambda step: 1 + (step + at) % delay, loses=lambda step: step > 10 and step % every == 0
    )
    committed: dict[tuple[int, str], bool] = {}
    waiting: dict[int, list[LayerWrite]] = {}
    run.run(0, 149)
    for told, decision in zip(run.events, run.decisions, strict=True):
        for event in told.committed:
            committed |= {(event, write.layer): write.base is None for write in waiting.pop(event)}
        for event in told.lost:
            waiting.pop(event)
        for write in decision.residuals:
            assert write.base is not None
            newest = max(
                s for (s, name), is_version in committed.items() if name == write.layer and is_version
            )
            assert write.base == (newest, 0), "the newest committed version"
            assert all(write.layer != other.layer for event in waiting.values() for other in event)
        if decision.writes:
            waiting[decision.step] = list(decision.writes)
    assert any(decision.residuals for decision in run.decisions)


def resumed(run: SimulatedRun, t_fail: int) -> Ledger:
    """The ledger after a failure; no version is due soon."""
    layers = tuple(
        LayerPlan(
            layer=layer.name, numel=layer.numel, step=step, attempt=1, age=t_fail - step, lost=t_fail - step,
            reason="drift", shards=(),
        )
        for layer in MAP.layers
        if (step := run.ledger.versions.layers[layer.name].committed) >= 0
    )  # fmt: skip
    plan = RecoveryPlan(
        mode="composite", world_size=2, t_fail=t_fail, t_fail_source="live", resume_step=t_fail + 1,
        trainer_state={"step": t_fail, "layercheck": run.ledger.to_state()},
        drift=dict.fromkeys(run.ledger.drift, 0.0),
        layers=layers,
    )  # fmt: skip
    return Ledger.resumed(MAP, run.config, plan)


def test_after_a_recovery_the_first_residuals_are_staggered_as_after_a_full_event():
    """All layers count from the step of the recovery: without a stagger they would be due together."""
    run = simulated(ON | {"k_ratio": 0.5}, share=1.0).run(0, 60)
    ledger, firsts = resumed(run, 60), dict[str, int]()
    for step in range(61, 130):
        moved = dict.fromkeys(ledger.drift, 0.01)
        ledger.observe(DriftReport(step, moved, 1e-4, committed_step=step - 1))
        decision = decide(ledger.facts(step, 1e-4), run.config)
        ledger.select(decision)
        for write in decision.writes:
            firsts.setdefault(write.layer, step if write.base else -1)
    found = [step for name, step in firsts.items() if step > 0 and name.startswith("layers.")]
    assert len(found) == len(set(found)) > 2, firsts


def test_the_stagger_of_a_recovery_is_over_with_the_first_residual():
    after = ResidualFacts(BASE, 0.06, is_first=False, stagger=0.5)
    assert decide(facts(replace(fact("a", 0.0), residual=after)), CONFIG).residuals
    assert not decide(facts(replace(fact("a", 0.0), residual=replace(after, stagger=1.0))), CONFIG).residuals
    both = replace(fact("a", 0.0, stagger=0.5), residual=replace(after, is_first=True, drift=0.03))
    assert not decide(facts(both), CONFIG).residuals, "one stagger, not both"
    books = Unsaved.since(60, MAP, "mean_abs")
    books.layers["norm"].base = (50, 1)
    first = books.residual_of("norm")
    assert first is not None
    assert first.stagger < 1
    books.take_residuals(61, ["norm"])
    books.commit(61)
    assert books.residual_of("norm") == ResidualFacts((50, 1), 0.0, is_first=False)


def test_a_layer_whose_version_was_lost_gets_none_before_its_next_version():
    run = simulated().run(0, 60)
    books = run.ledger.unsaved
    books.take(61, ["norm"])
    books.lose(61)
    assert books.residual_of("norm") is None
    assert books.residual_of("lm_head") is not None
    books.take(62, ["norm"])
    assert books.residual_of("norm") is None, "in flight"
    books.commit(62)
    assert books.residual_of("norm") == ResidualFacts((62, 0), 0.0, is_first=True)


def test_a_layer_whose_version_has_rotted_gets_none():
    run = simulated().run(0, 60)
    step = run.ledger.versions.layers["norm"].committed
    rotten = DriftReport(61, {}, 1e-4, committed_step=60, demoted=LayerStep("norm", step - 1))
    run.ledger.observe(rotten)
    assert run.ledger.unsaved.residual_of("norm") is None


def test_a_rotten_version_takes_no_base_from_the_newer_one_in_flight():
    run = simulated().run(0, 60)
    ledger = run.ledger
    ledger.observe(DriftReport(61, {}, 1e-4, committed_step=60))
    before = ledger.versions.layers["norm"].committed
    ledger.select(PersistDecision(61, (LayerWrite("norm", "drift", 1.0, 1.0, 3),)))
    ledger.observe(DriftReport(62, {}, 1e-4, committed_step=60, demoted=LayerStep("norm", before - 1)))
    ledger.observe(DriftReport(63, {}, 1e-4, committed_step=61))
    assert ledger.unsaved.residual_of("norm") == ResidualFacts((61, 0), 0.0, is_first=True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"bits": 6}, "residual.bits=6"),
        ({"block": 100}, "residual.block=100"),
        ({"k_ratio": 1.0}, "residual.k_ratio=1.0"),
        ({"bit": 8}, "unknown key 'residual.bit'"),
    ],
)
def test_wrong_settings_are_named(wrong: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        parse_config({"residual": wrong})


def test_a_pattern_that_fits_no_layer_is_refused():
    with pytest.raises(ConfigError, match=r"residual\.exclude: 'blocks"):
        simulated().ledger.fresh(MAP, config(residual=ON | {"exclude": ["blocks.*"]}))
