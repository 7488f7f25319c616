"""What status says of the death of a worker, a node, the cluster: never more than a recovery would find."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layercheck.cli import main
from layercheck.commands.status import describe
from layercheck.commands.watch import view
from layercheck.coordination import journal
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.status import summarize
from layercheck.drift_report import DriftReport
from layercheck.errors import VaultError
from layercheck.memory.held import Held
from layercheck.persistence.storage import LocalStorage
from layercheck.report.deaths import deaths_section
from layercheck.tracking.sealed import Sealed
from tests.runs import LAYERS, Group, start, with_base
from tests.unit.test_in_memory import held
from tests.vaults import Told, claim, event, make_vault, memory_event, rank_of

LAYER = "layers.0"


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "layercheck"))


def report(step: int, backlog: float = 0.0, left_out: int = 0) -> DriftReport:
    return DriftReport(step=step, delta={}, lr=1e-3, backlog=backlog, left_out=left_out)


# ------------------------------------------------------------------------------ what is known to be in memory


def test_a_copy_is_whole_once_a_later_report_says_that_no_rank_is_behind() -> None:
    sealed = Sealed()
    sealed.take(5, ["a", "b"])
    sealed.observe(report(5))
    assert sealed.step == {}, "the ranks spoke before they took it"
    sealed.observe(report(6, backlog=1.0))
    assert sealed.step == {}, "one rank still writes it"
    sealed.take(6, ["b"])
    sealed.observe(report(7))
    assert sealed.step == {"a": 5, "b": 6}


def test_where_a_rank_left_a_copy_out_nothing_is_known_of_what_was_on_its_way() -> None:
    sealed = Sealed()
    sealed.take(5, ["a", "b"])
    sealed.observe(report(6))
    sealed.take(6, ["b", "c"])
    sealed.observe(report(7, backlog=3.0, left_out=1))
    assert (sealed.step, sealed.left_out) == ({"a": 5}, 1), "the others may have given up the copy of step 5"
    sealed.observe(report(8))
    assert sealed.step == {"a": 5}, "the copy of step 6 is no more on its way"
    sealed.take(8, ["b"])
    sealed.observe(report(9))
    assert sealed.step == {"a": 5, "b": 8}


def test_a_rank_tells_of_each_copy_that_it_has_no_room_for(tmp_path: Path) -> None:
    storage, told = LocalStorage(str(tmp_path / "store")), Told()
    claim(storage)
    vault = make_vault(tmp_path, storage, told, budget=150)
    rank = rank_of(vault, storage, told)
    rank.stage(memory_event(1), ["a"])
    assert rank.sink.left_out == 0
    for count in (1, 2):
        with pytest.raises(VaultError, match="no room"):
            rank.stage(memory_event(1 + count), ["a", "b"])
        rank.sink.lost(memory_event(1 + count), 0, "as the writer says")
        assert rank.sink.left_out == count
    rank.stage(event(4), ["a", "b"])
    rank.stage(event(4), ["a", "b"])
    assert rank.sink.left_out == 3, "the storage has it; tried again it is the same copy"
    assert event(4) in {one for one, _ in told.recorded}
    vault.end(None)


# ----------------------------------------------------------------- what it means: as a recovery would find it


def beat(group: Group, step: int, memory: dict[str, Any] | None) -> None:
    state = group.state(step)
    if memory is not None:
        state["layercheck"]["memory"] = memory
    group.coordinator.heartbeat(group.attempt, step, state, dict.fromkeys(LAYERS, 0.25))
    group.coordinator.close()


def run_to_12(storage: LocalStorage, memory: dict[str, Any] | None) -> Group:
    """LAYER has a version of step 6 and a residual of step 9; the others one of step 4."""
    group = with_base(storage)
    group.save(6, LAYER)
    group.train(9)
    group.save_residual(9, LAYER, (6, 1))
    beat(group, 12, memory)
    return group


def lost_by_a_recovery(storage: LocalStorage, *found: Held) -> dict[str, tuple[int, int]]:
    """Layer -> (step of what comes back, lost steps), were the workers to die with this in memory."""
    plan = make_plan(replace(journal.load_facts(storage), held=found), PlanRequest())
    assert plan is not None
    return {
        one.layer: (
            one.memory.step if one.memory else one.residual.step if one.residual else one.step,
            one.lost,
        )
        for one in plan.layers
    }


def said(storage: LocalStorage, death: str) -> dict[str, tuple[int, int]]:
    rows = summarize(journal.load_facts(storage))["layers"]
    return {row["name"]: (row["if_dies"][death]["step"], row["if_dies"][death]["lost"]) for row in rows}


@pytest.mark.parametrize("step", [5, 8, 9, 10, 12])
def test_a_recovery_of_dead_workers_finds_what_was_said(storage: LocalStorage, step: int) -> None:
    group = run_to_12(storage, {"replicas": 0, "layers": {LAYER: step, "norm": 11}})
    found = (*held(group, step, LAYER), *held(group, 11, "norm"))
    assert said(storage, "worker") == lost_by_a_recovery(storage, *found)
    assert said(storage, "node") == said(storage, "cluster") == lost_by_a_recovery(storage)


def test_copies_of_an_earlier_attempt_lose_no_more_than_this_one_has_run(storage: LocalStorage) -> None:
    group = run_to_12(storage, None)
    copies = held(group, 11, "norm", offered=("t2",))
    second = start(storage, token="t2")
    beat(second, 14, {"replicas": 0, "layers": {"norm": 11}})
    assert said(storage, "worker") == lost_by_a_recovery(storage, *copies)
    assert said(storage, "worker")["norm"] == (11, 2)


def test_the_whole_is_weighted_by_size_and_copies_elsewhere_are_no_promise(storage: LocalStorage) -> None:
    run_to_12(storage, {"replicas": 1, "layers": dict.fromkeys(LAYERS, 11)})
    value = summarize(journal.load_facts(storage))
    stored = (10 * 8 + 20 * 3 + 30 * 8) / 60
    assert value["if_dies"] == {
        "worker": {"lost_steps": 1.0},
        "node": {"lost_steps": pytest.approx(stored), "at_best": 1.0},
        "cluster": {"lost_steps": pytest.approx(stored)},
    }
    row = next(row for row in value["layers"] if row["name"] == LAYER)
    assert row["if_dies"] == {
        "worker": {"tier": "memory", "step": 11, "lost": 1},
        "node": {
            "tier": "storage", "step": 9, "lost": 3, "at_best": {"tier": "peer", "step": 11, "lost": 1}
        },
        "cluster": {"tier": "storage", "step": 9, "lost": 3},
    }  # fmt: skip
    assert (value["lost_steps"], row["lost"]) == (pytest.approx(stored), 3), "I12: what the storage gives"


def test_a_roll_back_and_a_run_at_its_end_have_nothing_in_memory(storage: LocalStorage) -> None:
    group = run_to_12(storage, {"replicas": 0, "layers": dict.fromkeys(LAYERS, 11)})
    assert said(storage, "worker")["norm"] == (11, 1)
    group.coordinator.end_attempt(1, "completed")
    assert said(storage, "worker") == said(storage, "cluster")


def test_the_warm_up_goes_back_to_its_full_event_whatever_memory_holds(storage: LocalStorage) -> None:
    group = start(storage)
    group.save(0)
    group.save(2)
    beat(group, 3, {"replicas": 0, "layers": dict.fromkeys(LAYERS, 3)})
    assert said(storage, "worker") == said(storage, "cluster")


# --------------------------------------------------------------------------------------------- for a person


def test_a_person_reads_it_in_status_in_the_live_view_and_on_the_page(
    storage: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    run_to_12(storage, {"replicas": 1, "layers": {LAYER: 11}})
    facts = journal.load_facts(storage)
    words = (
        "if a worker dies now 5.67 (1 of 3 layers from memory), a node 6.33 (at best 5.67), the cluster 6.33"
    )
    text = describe(facts).text
    assert words in text
    assert "memory 11 (lost 1)" in text
    assert "storage 9 (lost 3), at best peer 11 (lost 1)" in text
    assert words in view(facts).cost
    page = deaths_section(summarize(facts))
    assert words in page
    assert '<td class="text">memory 11 (lost 1)</td>' in page
    assert main(["status", str(storage.root), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["if_dies"]["node"]["at_best"] < 6


def test_a_run_without_the_tier_reads_as_before(storage: LocalStorage) -> None:
    run_to_12(storage, None)
    facts = journal.load_facts(storage)
    assert "dies" not in describe(facts).text + view(facts).cost
    assert deaths_section(summarize(facts)) == ""
