"""What a campaign counts, with a run that only pretends: recoveries, hangs, drivers that end themselves."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from cluster import campaign as module
from cluster.campaign import WEIGHTS, Campaign, is_good
from cluster.campaign_run import Death
from cluster.witness import Life
from layercheck.errors import LayerCheckError

LIMIT_S = 0.3


class PretendedRun:
    """Attempt after attempt; `recovers` says whether a kill is followed by a step of a new one."""

    def __init__(self, folder: Path, recovers: bool = True, trains: bool = True) -> None:
        self.store, self.witness = folder / "store", folder / "witness"
        self.recovers, self.attempt, self.step = recovers, 1, 4 if trains else 0
        self.exit_codes: list[int] = []
        self.words = ""
        self.left: list[str] = []
        self.starts = 0

    def start(self) -> None:
        self.starts += 1

    def stop(self) -> None: ...

    def memory_left(self) -> list[str]:
        return self.left

    def kill(self, part: str, rng: random.Random) -> Death:
        death = Death(part, self.step, self.attempt, "pretended")
        if self.recovers:
            self.attempt, self.step = self.attempt + 1, self.step + 20
        return death

    def lives(self) -> list[Life]:
        plan = {"t_fail": self.step - 1}
        return [Life(0, 1, {}, self.attempt, self.step, plan, None, ((self.step, {}),) if self.step else ())]

    def position(self) -> tuple[int, int]:
        return self.attempt, self.step

    def driver_ended(self) -> int | None:
        return self.exit_codes.pop() if self.exit_codes else None

    def last_words(self) -> str:
        return self.words


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_LOOK_S", 0.005)
    monkeypatch.setattr(module, "_MAX_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_MAX_STEPS_BETWEEN", 0)


def go(run: PretendedRun, kills: int) -> dict[str, Any]:
    run.witness.mkdir()
    return Campaign(run, kills, 1, LIMIT_S).go()  # type: ignore[arg-type]


def test_every_kill_that_a_later_step_follows_is_recovered(tmp_path: Path) -> None:
    result = go(PretendedRun(tmp_path), 9)
    assert (result["kills"], result["recovered"], result["hangs"]) == (9, 9, 0)
    assert is_good(result)


def test_a_run_that_does_not_come_back_is_a_hang_and_the_campaign_ends(tmp_path: Path) -> None:
    result = go(PretendedRun(tmp_path, recovers=False), 9)
    assert (result["recovered"], result["hangs"]) == (0, 3)
    assert not is_good(result)


def test_a_run_that_never_trains_is_an_error_with_its_last_words(tmp_path: Path) -> None:
    run = PretendedRun(tmp_path, trains=False)
    run.words = "no such tokenizer"
    with pytest.raises(LayerCheckError, match="no such tokenizer"):
        go(run, 1)


@pytest.mark.parametrize(
    ("words", "good"), [("boom", False), ("error: 3 attempts in a row recovered and ended without", True)]
)
def test_a_driver_that_ends_by_itself_is_a_problem_unless_it_had_to(
    words: str, good: bool, tmp_path: Path
) -> None:
    run = PretendedRun(tmp_path)
    run.exit_codes, run.words = [1], words
    assert is_good(go(run, 2)) == good


def test_a_killed_coordinator_is_behind_when_the_journal_has_moved(tmp_path: Path) -> None:
    run = PretendedRun(tmp_path)
    run.witness.mkdir()
    (run.store / "attempts").mkdir(parents=True)
    campaign = Campaign(run, 1, 1, LIMIT_S)  # type: ignore[arg-type]
    for step, behind in ((run.step, False), (run.step + 1, False), (run.step + 2, True)):
        (run.store / "attempts/a001.progress.json").write_text(json.dumps({"step": step}))
        assert campaign._is_behind(Death("coordinator", run.step, 1, "")) == behind
        assert not campaign._is_behind(Death("worker", run.step, 1, ""))


def test_a_step_of_the_plan_itself_is_none_beyond_it(tmp_path: Path) -> None:
    run = PretendedRun(tmp_path)
    run.witness.mkdir()
    campaign = Campaign(run, 1, 1, LIMIT_S)  # type: ignore[arg-type]
    run.attempt = 2
    assert campaign._is_behind(Death("worker", 3, 1, ""))
    life = run.lives()[0]
    run.lives = lambda: [Life(0, 1, {}, 2, 1, {"t_fail": life.steps[-1][0]}, None, life.steps)]  # type: ignore[method-assign]
    assert not campaign._is_behind(Death("worker", 3, 1, ""))


@pytest.mark.parametrize(("left", "good"), [(1, True), (2, False)])
def test_memory_that_dead_nodes_left_is_a_problem(left: int, good: bool, tmp_path: Path) -> None:
    run = PretendedRun(tmp_path)
    run.left = [f"/dev/shm/{number}" for number in range(left)]
    result = go(run, 1)
    assert is_good(result) == good
    assert good or "2 folders in shared memory" in result["problems"][0]


def test_vaults_are_hit_where_there_are_any(tmp_path: Path) -> None:
    run = PretendedRun(tmp_path)
    run.witness.mkdir()
    hit: list[str] = []
    kill = run.kill
    run.kill = lambda part, rng: (hit.append(part), kill(part, rng))[1]  # type: ignore[method-assign]
    Campaign(run, 60, 1, LIMIT_S).go()  # type: ignore[arg-type]
    assert set(hit) == WEIGHTS.keys() - {"vault"}
    Campaign(run, 60, 1, LIMIT_S, has_vaults=True).go()  # type: ignore[arg-type]
    assert "vault" in hit


def test_every_part_has_its_weight() -> None:
    from cluster.campaign_run import PARTS

    assert WEIGHTS.keys() == PARTS.keys()
