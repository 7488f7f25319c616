"""The judge of a campaign finds what it is there to find: wrong bytes, lost versions, gaps, old layers."""

from pathlib import Path

import pytest

from cluster.campaign import main as campaign
from cluster.witness import Notes
from tests.campaign_store import LAYERS, Store, hashes, values


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Attempt 1 saves embed at 0, 2 and norm at 0, 3 and dies after 4; attempt 2 goes on to 6."""
    store = Store(tmp_path / "layercheck", tmp_path / "witness")
    store.attempt(0, -1, range(1, 5))
    store.commit(0, 1, *LAYERS)
    store.commit(2, 1, "embed")
    store.commit(3, 1, "norm")
    return store


def test_a_good_recovery_has_no_problems(store: Store) -> None:
    store.attempt(4, 3, range(5, 7), store.plan_for(4, embed=(2, 1), norm=(3, 1)))
    store.commit(6, 2, "norm")
    verdict = store.judge().verdict
    assert verdict.problems == []
    assert (verdict.max_age, verdict.lost_versions, verdict.wrong_bytes) == (2, 0, 0)
    assert verdict.compared == 2 + 5


def test_other_bytes_in_an_event_are_wrong(store: Store) -> None:
    store.commit(4, 1, "embed", wrong={"embed": values("embed", 3, 1)})
    verdict = store.judge().verdict
    assert verdict.wrong_bytes == 1
    assert "embed of (step, attempt) (4, 1), rank 0, stored: other bytes" in verdict.problems[0]


def test_a_version_of_a_step_that_nobody_ran_is_wrong(store: Store) -> None:
    store.commit(5, 1, "embed")
    assert "nobody saw it" in store.judge().verdict.problems[0]


def test_other_bytes_after_the_install_are_wrong(store: Store) -> None:
    plan = store.plan_for(4, embed=(2, 1), norm=(3, 1))
    plan["installed"][0]["norm"] = hashes(2, 1)["norm"]
    store.attempt(4, 3, range(5, 7), plan)
    verdict = store.judge().verdict
    assert verdict.wrong_bytes == 1
    assert "norm of (step, attempt) (3, 1), rank 0, installed by attempt 2" in verdict.problems[0]


def test_an_older_version_than_the_newest_committed_one_is_a_lost_version(store: Store) -> None:
    store.attempt(4, 3, range(5, 7), store.plan_for(4, embed=(2, 1), norm=(0, 1)))
    verdict = store.judge().verdict
    assert verdict.lost_versions == 1
    assert "attempt 2 took norm of (0, 1), not of (3, 1)" in verdict.problems[0]


def test_a_commit_of_a_zombie_is_not_missed(store: Store) -> None:
    store.attempt(4, 3, range(5, 7), store.plan_for(4, embed=(2, 1), norm=(3, 1)))
    store.commit(4, 1, "embed")  # after attempt 2 had looked
    assert store.judge().verdict.problems == []


def test_a_roll_back_takes_the_newest_event_of_all_layers(store: Store) -> None:
    good = store.plan_for(4, embed=(0, 1), norm=(0, 1)) | {"mode": "warmup_rollback"}
    store.attempt(0, 3, range(1, 3), good)
    assert store.judge().verdict.problems == []


def test_a_roll_back_to_an_older_full_event_is_a_loss(store: Store) -> None:
    store.commit(4, 1, *LAYERS)
    store.attempt(
        0, 4, range(1, 3), store.plan_for(4, embed=(0, 1), norm=(0, 1)) | {"mode": "warmup_rollback"}
    )
    assert store.judge().verdict.lost_versions == 2


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([5, 7], "steps 5 to 7 with gaps ['5|7'], not 5 to 7"),
        ([5, 6, 6, 7], "gaps ['6|6']"),
        ([6, 7], "steps 6 to 7, not 5 to 7"),
    ],
)
def test_gaps_and_repetitions_of_steps_are_found(store: Store, steps: list[int], words: str) -> None:
    plan = store.plan_for(4, embed=(2, 1), norm=(3, 1))
    store.attempt(4, 3, steps, plan)  # type: ignore[arg-type]
    (problem,) = store.judge().verdict.problems
    assert words in problem


def test_steps_that_were_undone_may_run_again_once(store: Store) -> None:
    plan = store.plan_for(4, embed=(0, 1), norm=(0, 1)) | {"mode": "warmup_rollback"}
    store.attempt(0, 3, range(1, 5), plan)
    store.attempt(4, 4, range(5, 6), store.plan_for(4, embed=(0, 1), norm=(0, 1)))
    assert store.judge().verdict.problems == []


def test_steps_lost_between_two_attempts_are_a_gap(store: Store) -> None:
    store.attempt(6, 3, range(7, 8), store.plan_for(6, embed=(2, 1), norm=(3, 1)))
    assert "attempt 1 of 2: steps 1 to 4, not 1 to 6" in store.judge().verdict.problems[0]


def test_a_layer_above_the_limit_is_a_problem(store: Store) -> None:
    store.attempt(4, 3, range(5, 10), store.plan_for(4, embed=(2, 1), norm=(3, 1)))
    store.attempt(9, 3, range(10, 11), store.plan_for(9, embed=(2, 1), norm=(3, 1)))
    assert "attempt 3: age 7 is above s_max=6" in store.judge().verdict.problems


def test_a_line_that_a_kill_cut_off_is_not_read(store: Store) -> None:
    (path,) = store.notes.iterdir()
    path.write_bytes(path.read_bytes() + b'{"what": "step", "st')
    notes = Notes(store.notes)
    assert [step for step, _ in notes.lives()[0].steps] == [1, 2, 3, 4]
    path.write_bytes(path.read_bytes() + b'ep": 5, "layers": {}}\n')
    assert [step for step, _ in notes.lives()[0].steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--kills", "0"], "--kills 0"), (["--folder", "{used}"], "is not empty")]
)
def test_wrong_arguments_of_a_campaign_are_named(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(SystemExit) as ended:
        campaign([text.format(used=tmp_path) for text in arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
