"""Who kills a run, when, and what he says if it does not come back; the run only pretends."""

import json
from pathlib import Path

import pytest

from app.measure import failing
from app.measure.failing import SETTLE_STEPS, FailingRun
from layercheck.errors import LayerCheckError
from tests.fakes import Clock

START_S, STEP_S = 5.0, 1.0
BETWEEN_WORKERS_S = 1.0


class PretendedRun:
    """Groups of two processes: there 5 and 6 s after a kill, and a step a second from 10 s on."""

    name = "pretended"

    def __init__(self, folder: Path, clock: Clock) -> None:
        self.log, self.clock = folder / "steps", clock
        self.log.mkdir(parents=True)
        self.groups: list[tuple[int, int]] = []
        self.born_s: list[float] = []
        self.signalled: list[int] = []
        self.step, self.code, self.comes_back = 0, None, True
        self.stopped = False

    def start(self) -> None:
        self._new_group()

    def stop(self) -> None:
        self.stopped = True

    def _new_group(self) -> None:
        first = 100 * (len(self.groups) + 1)
        self.groups.append((first, first + 1))
        self.born_s.append(self.clock.now + START_S)

    def kill(self, pid: int, sig: int) -> None:
        assert pid in self.groups[-1], "a group that dies anyway was hit"
        assert self.clock.now >= self.born_s[-1] + BETWEEN_WORKERS_S, "a group that is not complete was hit"
        self._train()
        self.signalled.append(pid)
        if self.comes_back:
            self._new_group()

    def actors(self, name: str) -> list[int]:
        assert name == "RayTrainWorker"
        dying = list(self.groups[-2]) if len(self.groups) > 1 else []
        age_s = self.clock.now - self.born_s[-1]
        return dying + [pid for i, pid in enumerate(self.groups[-1]) if age_s >= i * BETWEEN_WORKERS_S]

    def driver_ended(self) -> int | None:
        self._train()
        return self.code

    def last_words(self) -> str:
        return "the last words"

    def _train(self) -> None:
        began_s = self.born_s[-1] + START_S
        path = self.log / f"{self.groups[-1][0]}.jsonl"
        done = path.read_text().count("\n") if path.exists() else 0
        while began_s + (done + 1) * STEP_S <= self.clock.now:
            self.step += 1
            row = [self.step, began_s + done * STEP_S, began_s + (done + 1) * STEP_S, 0.0, 0]
            with open(path, "a") as file:
                file.write(json.dumps(row) + "\n")
            done += 1


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(failing.time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(failing.time, "sleep", clock.sleep)
    return clock


@pytest.fixture
def pretended(tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch) -> PretendedRun:
    run = PretendedRun(tmp_path, clock)
    monkeypatch.setattr(failing, "PrivateRun", lambda *_: run)
    monkeypatch.setattr(failing.os, "kill", run.kill)
    return run


def quiet(text: str) -> None:
    assert text


def test_kills_come_at_their_times_and_wait_for_a_group_that_none_has_hit(
    tmp_path: Path, pretended: PretendedRun
) -> None:
    with FailingRun(tmp_path, "c", (), begin_step=10) as run:
        seen = run.kill_at([20.5, 22.0, 61.0], quiet)
    assert pretended.stopped
    after_s = [kill_s - seen.begin_s for kill_s in seen.kills_s]
    assert after_s == pytest.approx([20.5, 26.5, 61.0], abs=0.3), "the second waited for its group"
    assert [pid // 100 for pid in pretended.signalled] == [1, 2, 3]
    assert [life[0].step for life in seen.lives] == [1, 31, 55]
    assert seen.begin_s == seen.lives[0][9].end_s


@pytest.mark.parametrize(("steps_between", "made"), [(0, SETTLE_STEPS), (25, 25)])
def test_recoveries_are_timed_after_a_stretch_without_failure(
    tmp_path: Path, pretended: PretendedRun, steps_between: int, made: int
) -> None:
    with FailingRun(tmp_path, "c", (), begin_step=10) as run:
        seen = run.time_recoveries(steady_steps=30, kills=3, steps_between=steps_between, say=quiet)
    assert len(seen.kills_s) == 3
    assert [len(life) for life in seen.lives] == [40, made, made, made]


def test_a_run_without_a_warm_up_is_watched_from_its_first_step(
    tmp_path: Path, pretended: PretendedRun
) -> None:
    with FailingRun(tmp_path, "c", (), begin_step=0) as run:
        seen = run.kill_at([5.0, 30.0], quiet)
    assert seen.begin_s == seen.lives[0][0].begin_s


def test_a_run_that_ends_by_itself_is_one_error_with_its_last_words(
    tmp_path: Path, pretended: PretendedRun
) -> None:
    pretended.code = 3
    with pytest.raises(LayerCheckError, match="code 3 while step 10 was waited for: the last words"):
        FailingRun(tmp_path, "c", (), begin_step=10).__enter__().kill_at([5.0, 9.0], quiet)


def test_every_wait_has_a_limit_and_names_what_it_waited_for(tmp_path: Path, pretended: PretendedRun) -> None:
    pretended.comes_back = False
    with (
        pytest.raises(LayerCheckError, match=r"waited 240 s in vain for a worker group .*: the last words"),
        FailingRun(tmp_path, "c", (), begin_step=10) as run,
    ):
        run.kill_at([5.0, 9.0], quiet)
    assert pretended.stopped
