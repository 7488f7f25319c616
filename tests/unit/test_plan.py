import math
from dataclasses import replace
from pathlib import Path

import pytest

from layercheck.coordination import journal
from layercheck.coordination.lineage import Lineage
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.errors import NoPlanError
from layercheck.manifest import RecoveryPlan
from layercheck.persistence.storage import LocalStorage
from tests.runs import LAYERS, Group, coordinator, run_record, with_base


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "layercheck"))


def plan(storage: LocalStorage, **request: object) -> RecoveryPlan:
    made = make_plan(journal.load_facts(storage), PlanRequest(**request))  # type: ignore[arg-type]
    assert made is not None
    return made


def trained(storage: LocalStorage) -> Group:
    """Base at 4, norm at 6 and 8, layers.0 at 7; stopped at 9."""
    group = with_base(storage)
    for step, layer in ((6, "norm"), (7, "layers.0"), (8, "norm")):
        group.save(step, layer)
    group.train(9, since=4)
    group.coordinator.close()
    return group


def steps(made: RecoveryPlan) -> list[int]:
    return [layer.step for layer in made.layers]


def test_i15_a_version_counts_only_up_to_what_its_successors_saw_and_began_at() -> None:
    chain = Lineage().extended(1, 0, -1).extended(2, 10, 8).extended(4, 5, 12)
    assert chain.links[-1].predecessor == 2
    assert [chain.is_live(step, 1) for step in (5, 6)] == [True, False]  # 4 began at 5
    assert [chain.is_live(step, 2) for step in (5, 6)] == [True, False]
    assert chain.is_live(99, 4)
    assert not chain.is_live(1, 3)  # never seen in this chain
    unseen = Lineage().extended(1, 0, -1).extended(2, 10, 8)
    assert [unseen.is_live(step, 1) for step in (8, 9)] == [True, False]


def test_modes_choose_their_versions(storage: LocalStorage) -> None:
    trained(storage)
    assert steps(plan(storage)) == [4, 7, 8]
    uniform = plan(storage, mode="uniform")
    assert (uniform.mode, steps(uniform), uniform.resume_step) == ("uniform", [4, 4, 4], 5)
    assert uniform.trainer_state["step"] == 4
    assert uniform.drift == dict.fromkeys(LAYERS, 0.0)
    young = plan(storage, mode="strict", strict_max_age=5)
    assert (young.mode, steps(young), young.resume_step) == ("strict", [4, 7, 8], 10)
    with pytest.raises(NoPlanError, match=r"strict_max_age=4: embed_tokens \(5 steps\); raise") as caught:
        plan(storage, mode="strict", strict_max_age=4)
    assert caught.value.facts["layers"] == ("embed_tokens",)


def test_without_a_file_one_layer_falls_back(storage: LocalStorage) -> None:
    trained(storage)
    made = plan(storage, without=frozenset(["events/step-00000008.a001/rank-00001.safetensors"]))
    assert steps(made) == [4, 7, 6]
    assert [layer.fallback for layer in made.layers] == [False, False, True]


def test_at_step_plans_as_of_then(storage: LocalStorage) -> None:
    trained(storage)
    made = plan(storage, at_step=7)
    assert (made.t_fail, steps(made)) == (7, [4, 7, 6])
    assert made.trainer_state["step"] == 7
    assert [layer.age for layer in made.layers] == [3, 0, 1]
    assert made.lost_steps == pytest.approx((10 * 3 + 20 * 0 + 30 * 1) / 60)


def test_a_step_that_came_twice_is_that_of_the_lineage(storage: LocalStorage) -> None:
    """Attempt 1 came to 9, attempt 2 rolled back to 4 and saved steps 6 and 8 again."""
    trained(storage)
    dead = journal.load_facts(storage).commits
    second = coordinator(storage)
    group = Group(second, storage, second.begin_attempt("t2", "s1", 2, "uniform"))
    assert group.grant.r_b == 4
    group.save(6, "layers.0")
    group.save(8, "embed_tokens")
    group.train(8, since=4)
    second.close()
    found = journal.load_facts(storage)
    unswept = {
        commit.event: commit for commit in (*dead, *found.commits)
    }  # collection may come any time later
    found = replace(found, commits=tuple(unswept.values()))
    plans = {n: make_plan(found, PlanRequest(at_step=n)) for n in (4, 6, 8)}
    assert {n: [(v.step, v.attempt) for v in made.layers] for n, made in plans.items() if made} == {
        4: [(4, 1), (4, 1), (4, 1)],
        6: [(4, 1), (6, 2), (4, 1)],
        8: [(8, 2), (6, 2), (4, 1)],
    }
    assert plan(storage, at_step=6).resume_step == 7
    with pytest.raises(NoPlanError, match="has come to step 8, not to 9"):
        plan(storage, at_step=9)


def test_a_step_from_before_the_oldest_version_is_refused_by_name(storage: LocalStorage) -> None:
    trained(storage)
    for event in journal.event_folders(storage):
        if event.step < 4:
            storage.delete(event.folder)
    with pytest.raises(
        NoPlanError, match=r"no version of embed_tokens up to step 3, its oldest is of step 4"
    ):
        plan(storage, at_step=3)


def test_max_age_refuses_and_names_the_layers(storage: LocalStorage) -> None:
    trained(storage)
    assert plan(storage, max_age=5).max_age == 5
    with pytest.raises(NoPlanError, match="embed_tokens") as caught:
        plan(storage, max_age=4)
    assert caught.value.facts["layers"] == ("embed_tokens",)


def test_i7_layers_without_any_version_are_named(storage: LocalStorage) -> None:
    group = trained(storage)
    for event in journal.event_folders(storage):
        if event.step <= 4:
            storage.delete(event.folder)
    with pytest.raises(NoPlanError, match=r"no usable version of embed_tokens"):
        plan(storage)
    assert group.attempt == 1


def test_a_version_without_the_rows_of_all_ranks_is_none(storage: LocalStorage) -> None:
    trained(storage)
    facts = journal.load_facts(storage)
    newest = facts.commits[-1]
    half = newest.model_copy(update={"records": newest.records[:1]})
    made = make_plan(replace(facts, commits=(*facts.commits[:-1], half)), PlanRequest())
    assert made is not None
    assert steps(made) == [4, 7, 6]


def test_a_frozen_layer_comes_from_its_only_version_and_no_figure_counts_it(storage: LocalStorage) -> None:
    made = coordinator(storage)
    storage.write("probe", [b"x"])
    made.open_run(run_record(frozen=("lora_base",)), "probe")
    group = Group(made, storage, made.begin_attempt("t1", "s1", 2, "composite"))
    group.save(0, *LAYERS, "lora_base")
    for step in (2, 4, 6, 8):
        group.save(step)
    group.train(9)
    made.close()
    found = plan(storage)
    assert steps(found) == [8, 8, 8, 0]
    assert (found.max_age, found.weighted_age, found.layers[-1].age) == (1, 1.0, 9)
    assert [e.step for e in journal.event_folders(storage)] == [0, 6, 8]  # I11: never collected


def test_the_journaled_drift_is_used_only_where_it_counts_from_the_chosen_version(
    storage: LocalStorage,
) -> None:
    group = trained(storage)
    assert plan(storage).drift == dict.fromkeys(LAYERS, 0.25)
    without = frozenset(["events/step-00000008.a001/rank-00001.safetensors"])
    assert plan(storage, without=without).drift["norm"] == math.inf
    storage.delete("attempts/a001.progress.json")
    found = plan(storage)
    assert found.t_fail == 8
    assert found.drift == {"embed_tokens": math.inf, "layers.0": math.inf, "norm": 0.0}
    assert group.attempt == 1


def test_an_attempt_that_died_at_once_passes_the_drift_on(storage: LocalStorage) -> None:
    trained(storage)
    coordinator(storage).begin_attempt("t2", "s1", 2, "composite")
    found = plan(storage)
    assert (found.t_fail, found.t_fail_source) == (9, "journal")
    assert found.drift == dict.fromkeys(LAYERS, 0.25)
