"""The judge of a campaign on residuals: no versions, and what they have to become at a recovery."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cluster import campaign_files
from cluster.campaign_checks import Judge
from cluster.campaign_files import Part, committed_saves
from cluster.campaign_residuals import added
from layercheck.errors import LayerCheckError
from layercheck.persistence.quantise import Code
from tests.campaign_store import LAYERS, State, Store, hash_from, hashes, rounded, values

BASE, RESIDUAL = (2, 1), (4, 1)
"""Of embed, in the store of these tests."""


def begin(folder: Path, bits: int = 8) -> Store:
    """Two ranks: versions of step 0, of embed at 2 and of norm at 4, residuals of embed at 3 and 4."""
    code = Code(bits=bits, block=64)  # type: ignore[arg-type]
    store = Store(folder / "layercheck", folder / "witness", ranks=2, code=code)
    store.attempt(0, -1, range(1, 6))
    store.commit(0, 1, *LAYERS)
    store.commit(2, 1, "embed")
    store.commit(3, 1, residuals={"embed": BASE})
    store.commit(4, 1, "norm", residuals={"embed": BASE})
    return store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return begin(tmp_path)


def good_plan(store: Store) -> dict[str, Any]:
    return store.plan_for(5, {"embed": RESIDUAL}, embed=BASE, norm=(4, 1))


def with_embed(store: Store, installed: str) -> dict[str, Any]:
    """The good plan, but rank 1 has something else of embed."""
    plan = good_plan(store)
    assert plan["installed"][1]["embed"] != installed
    plan["installed"][1]["embed"] = installed
    return plan


# ---------------------------------------------------------------- what came back


@pytest.mark.parametrize("bits", [8, 4])
def test_a_version_and_its_newest_residual_are_what_has_to_come_back(tmp_path: Path, bits: int) -> None:
    store = begin(tmp_path, bits)
    store.attempt(5, 4, range(6, 8), good_plan(store))
    store.commit(7, 2, residuals={"embed": BASE})  # of a later attempt, on the same version
    verdict = store.judge().verdict
    assert verdict.problems == []
    assert (verdict.lost_versions, verdict.lost_residuals, verdict.wrong_bytes) == (0, 0, 0)
    assert verdict.compared == 2 * 2 + 2 * 4, "both layers installed, four stored versions, on two ranks"
    assert verdict.compared_residuals == 2


def as_it_was(rank: int) -> str:
    return hashes(*RESIDUAL, rank)["embed"]


def without_the_residual(rank: int) -> str:
    return hashes(*BASE, rank)["embed"]


def with_the_moments_of_the_residuals_step(rank: int) -> str:
    code = Code(bits=8, block=64)
    weights = values("embed", *BASE, rank) + rounded("embed", RESIDUAL, BASE, rank, code)
    return hash_from("embed", weights, values("embed", *RESIDUAL, rank, "exp_avg"), BASE[0])


def with_the_scalars_of_the_residuals_step(rank: int) -> str:
    code = Code(bits=8, block=64)
    weights = values("embed", *BASE, rank) + rounded("embed", RESIDUAL, BASE, rank, code)
    return hash_from("embed", weights, values("embed", *BASE, rank, "exp_avg"), RESIDUAL[0])


def with_the_older_residual(rank: int) -> str:
    code = Code(bits=8, block=64)
    weights = values("embed", *BASE, rank) + rounded("embed", (3, 1), BASE, rank, code)
    return hash_from("embed", weights, values("embed", *BASE, rank, "exp_avg"), BASE[0])


@pytest.mark.parametrize(
    "wrong",
    [
        as_it_was,
        without_the_residual,
        with_the_moments_of_the_residuals_step,
        with_the_scalars_of_the_residuals_step,
        with_the_older_residual,
    ],
)
def test_anything_but_the_sum_is_wrong(store: Store, wrong: Any) -> None:
    store.attempt(5, 4, range(6, 8), with_embed(store, wrong(rank=1)))
    verdict = store.judge().verdict
    assert verdict.wrong_bytes == 1
    (problem,) = verdict.problems
    assert "embed of (step, attempt) (2, 1) and the residual of 4, rank 1, installed by attempt 2" in problem


def test_the_sum_of_another_rank_is_wrong(store: Store) -> None:
    store.attempt(5, 4, range(6, 8), with_embed(store, store.sum_of("embed", BASE, RESIDUAL, 0)))
    assert store.judge().verdict.wrong_bytes == 1


@pytest.mark.parametrize(
    ("base_in_file", "words"),
    [(BASE, None), ((0, 1), "embed of (step, attempt) (2, 1) and the residual of 5")],
)
def test_a_file_with_a_residual_of_another_version_is_wrong(
    store: Store, base_in_file: State, words: str | None
) -> None:
    """The commit says that it adds to BASE."""
    folder = store.commit(5, 1, residuals={"embed": BASE})
    right = (folder / "commit.parquet").read_bytes()
    for path in (*folder.iterdir(), folder):
        path.rmdir() if path.is_dir() else path.unlink()
    store.commit(5, 1, residuals={"embed": base_in_file})
    (folder / "commit.parquet").write_bytes(right)
    store.attempt(5, 5, range(6, 8), store.plan_for(5, {"embed": (5, 1)}, embed=BASE, norm=(4, 1)))
    problems = store.judge().verdict.problems
    assert len(problems) == (2 if words else 0)
    assert all(str(words) in problem for problem in problems)


@pytest.mark.parametrize(
    ("name", "offset", "base_step", "fits"),
    [("w", 4, 2, True), ("w", 0, 2, False), ("v", 4, 2, False), ("w", 4, 3, False)],
)
def test_a_residual_of_something_else_adds_to_nothing(
    name: str, offset: int, base_step: int, fits: bool
) -> None:
    one = np.ones(1, np.float32).tobytes()
    version = Part({"w/fp32": one}, {"w": {"offset": 4, "numel": 1, "state": {}}})
    coding = {"bits": 8, "block": 64, "base_step": base_step, "base_attempt": 1}
    tensors = {f"{name}/residual": bytes(64), f"{name}/residual_scale": bytes(2)}
    about = {name: {"offset": offset, "numel": 1, "state": {}, "residual": coding}}
    assert added(version, Part(tensors, about), BASE) == (version if fits else Part())


def test_files_that_were_collected_meanwhile_are_not_compared(store: Store) -> None:
    plan = with_embed(store, "whatever")
    store.attempt(5, 4, range(6, 8), plan)
    store.collect(4, 1)
    verdict = store.judge().verdict
    assert verdict.problems == []
    assert verdict.compared_residuals == 0


# ---------------------------------------------------------------- which residual


def test_an_older_residual_than_the_newest_committed_one_is_a_lost_residual(store: Store) -> None:
    plan = store.plan_for(5, {"embed": (3, 1)}, embed=BASE, norm=(4, 1))
    store.attempt(5, 4, range(6, 8), plan)
    verdict = store.judge().verdict
    assert (verdict.lost_residuals, verdict.lost_versions, verdict.wrong_bytes) == (1, 0, 0)
    assert verdict.problems == ["attempt 2 took embed of (2, 1) with the residual of 3, not with that of 4"]


def test_a_version_that_came_back_without_its_residual_is_a_lost_residual(store: Store) -> None:
    store.attempt(5, 4, range(6, 8), store.plan_for(5, embed=BASE, norm=(4, 1)))
    verdict = store.judge().verdict
    assert (verdict.lost_residuals, verdict.lost_versions, verdict.wrong_bytes) == (1, 0, 0)
    assert verdict.problems == ["attempt 2 took embed of (2, 1) with no residual, not with that of 4"]


def test_a_collected_residual_is_missed_as_well(store: Store) -> None:
    store.attempt(5, 4, range(6, 8), store.plan_for(5, embed=BASE, norm=(4, 1)))
    store.collect(4, 1)
    assert store.judge().verdict.lost_residuals == 1


def test_a_residual_of_a_zombie_is_not_missed(store: Store) -> None:
    store.attempt(5, 4, range(6, 8), good_plan(store))
    store.commit(5, 1, residuals={"embed": BASE})  # after attempt 2 had looked
    assert store.judge().verdict.problems == []


def test_a_residual_beyond_the_failure_is_not_missed(store: Store) -> None:
    store.commit(5, 1, residuals={"embed": BASE})
    plan = good_plan(store) | {"t_fail": 4}
    store.attempt(4, 5, range(5, 8), plan)
    assert [text for text in store.judge().verdict.problems if "residual" in text] == []


def test_residuals_of_other_versions_are_not_missed(store: Store) -> None:
    store.commit(5, 1, "embed", residuals={"norm": (0, 1)})
    store.attempt(5, 5, range(6, 8), store.plan_for(5, embed=(5, 1), norm=(4, 1)))
    assert store.judge().verdict.problems == []


def test_residuals_of_another_layers_version_of_the_same_step_are_not_missed(store: Store) -> None:
    store.commit(5, 1, residuals={"norm": (4, 1)})
    store.attempt(5, 5, range(6, 8), store.plan_for(5, {"norm": (5, 1)}, embed=(4, 1), norm=(4, 1)))
    assert store.judge().verdict.lost_residuals == 0


@pytest.mark.parametrize("saw_step", [3, 4])
def test_a_residual_that_does_not_count_must_not_come_back(store: Store, saw_step: int) -> None:
    """As attempt 2 began it had seen the commits up to step 3 alone."""
    residuals = {"embed": RESIDUAL}
    store.attempt(5, saw_step, range(6, 8), store.plan_for(5, residuals, embed=BASE, norm=(0, 1)))
    problems = [text for text in store.judge().verdict.problems if "embed" in text]
    assert len(problems) == (2 if saw_step == 3 else 0)
    assert all("and the residual of 4" in text and "no such residual counts" in text for text in problems)


def test_residuals_are_no_versions_that_could_be_lost(store: Store) -> None:
    store.commit(5, 1, residuals={"embed": BASE, "norm": (4, 1)})
    residuals = {"embed": (5, 1), "norm": (5, 1)}
    store.attempt(5, 5, range(6, 8), store.plan_for(5, residuals, embed=BASE, norm=(4, 1)))
    verdict = store.judge().verdict
    assert verdict.problems == []
    assert verdict.compared_residuals == 4


@pytest.mark.parametrize("residuals", [{}, {"embed": RESIDUAL}])
def test_a_roll_back_takes_no_residuals_and_finds_no_state_in_them(
    store: Store, residuals: Mapping[str, State]
) -> None:
    """At step 4 norm has a version and embed a residual: no state of both but that of step 0."""
    version = BASE if residuals else (0, 1)
    plan = store.plan_for(5, residuals, embed=version, norm=(0, 1)) | {"mode": "warmup_rollback"}
    store.attempt(0, 4, range(1, 4), plan)
    problems = store.judge().verdict.problems
    assert len(problems) == (2 if residuals else 0)
    assert all("no such residual counts" in text for text in problems)


def test_a_newer_version_from_memory_has_no_residual(store: Store) -> None:
    """It was never committed; the ranks noted what it was. The storage has an older one, with a residual."""
    plan = store.plan_for(5, embed=(5, 1), norm=(4, 1))
    plan["layers"][0]["source"] = "memory"
    store.attempt(5, 4, range(6, 8), plan)
    verdict = store.judge().verdict
    assert verdict.problems == []
    assert verdict.compared_residuals == 0
    assert verdict.compared == 2 * 2 + 2 * 4


# ---------------------------------------------------------------- what is stored


def test_a_version_beside_a_residual_in_one_file_is_compared(store: Store) -> None:
    store.commit(5, 1, "norm", residuals={"embed": BASE}, wrong={"norm": values("norm", 3, 1)})
    verdict = store.judge().verdict
    assert verdict.wrong_bytes == 2
    assert "norm of (step, attempt) (5, 1), rank 0, stored: other bytes" in verdict.problems[0]


def test_a_residual_that_the_commit_calls_a_version_is_wrong(store: Store) -> None:
    folder = store.commit(5, 1, residuals={"embed": BASE})
    other = begin_again(folder)
    (folder / "commit.parquet").write_bytes((other.commit(5, 1, "embed") / "commit.parquet").read_bytes())
    assert store.judge().verdict.wrong_bytes == 2


def begin_again(folder: Path) -> Store:
    return Store(folder.parents[2] / "other", folder.parents[2] / "other-witness")


def test_a_version_whose_history_was_merged_with_that_of_residuals_counts(store: Store) -> None:
    store.collect(2, 1)
    store.collect(3, 1)
    found = {(s.layer, s.step): (s.base, s.folder) for s in committed_saves(store.folder)}
    assert found["embed", 2] == (None, "")
    assert found["embed", 3] == (BASE, "")
    assert found["embed", 4] == (BASE, "events/step-00000004.a001")


# ---------------------------------------------------------------- while the run goes on


def test_what_is_committed_and_taken_while_the_judge_reads_is_known(store: Store) -> None:
    judge = Judge(store.folder, store.notes)
    lives = judge._notes.lives

    def later() -> Any:
        if len(store.links) == 1:
            store.commit(5, 1, residuals={"embed": BASE})
            store.attempt(5, 5, range(6, 8), store.plan_for(5, {"embed": (5, 1)}, embed=BASE, norm=(4, 1)))
        return lives()

    judge._notes.lives = later  # type: ignore[method-assign]
    judge.look()
    assert judge.verdict.problems == []
    assert judge.verdict.compared_residuals == 2


def test_an_event_is_judged_once_the_notes_of_its_step_are_read(store: Store) -> None:
    judge = Judge(store.folder, store.notes)
    lives = judge._notes.lives

    def earlier() -> Any:
        found = lives()
        store.commit(6, 1, "embed")  # its step was noted after that
        return found

    judge._notes.lives = earlier  # type: ignore[method-assign]
    judge.look()
    assert judge.verdict.problems == []


def test_parts_of_the_history_that_are_merged_while_they_are_read_are_not_missed(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.collect(2, 1)
    store.collect(3, 1)
    before = committed_saves(store.folder)
    read = campaign_files._saves

    def merges(path: Path, folder: str) -> Any:
        if not folder and path.exists() and path.name < "merged":
            path.rename(path.with_name(f"merged-{path.name}"))
        return read(path, folder)

    monkeypatch.setattr(campaign_files, "_saves", merges)
    assert committed_saves(store.folder) == before


def test_a_history_that_never_stands_still_is_an_error(store: Store) -> None:
    (store.folder / "history" / "gone.parquet").symlink_to("nowhere")
    with pytest.raises(LayerCheckError, match="history: files went in each of 10 looks"):
        committed_saves(store.folder)


def test_the_rounding_of_these_tests_can_be_seen() -> None:
    """Else what came back rounded could not be told from what was."""
    code = Code(bits=8, block=64)
    true = values("embed", *RESIDUAL) - values("embed", *BASE)
    assert not np.array_equal(rounded("embed", RESIDUAL, BASE, 0, code), true)
