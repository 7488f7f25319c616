"""Saves beside training: what waits for what, and what is never skipped."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

from app.baselines.checkfreq import CheckFreq
from app.baselines.settings import CheckFreqSettings
from tests import micro
from tests.fakes import FaultyStorage, SlowStorage
from tests.harness import run_ranks
from tests.integration.methods import open_method, train

LIMIT_S = 60


def every_2(zero3: Any, committer: Any) -> CheckFreq:
    return CheckFreq(zero3, committer, CheckFreqSettings(mode="manual", interval_steps=2), LIMIT_S)


def tuned(zero3: Any, committer: Any) -> CheckFreq:
    settings = CheckFreqSettings(profile_from=2, profile_steps=2, max_overhead=0.9)
    return CheckFreq(zero3, committer, settings, LIMIT_S)


def dcp_every_2(zero3: Any, committer: Any) -> Any:
    from app.baselines.committer import own_group
    from app.baselines.dcp_async import DcpAsync

    return DcpAsync(zero3, committer, own_group(LIMIT_S), 2, LIMIT_S)


def _copier(method: Any) -> tuple[Any, str]:
    """The object and its function that copies a state in another thread."""
    return (
        (method.image, "fill")
        if isinstance(method, CheckFreq)
        else (method._stager._state_dict_stager, "stage")
    )


def _slow_copy(folder: str, make: Any) -> list[str]:
    """The copy of step 2 ends only when the update of step 3 has asked for it."""
    engine = micro.build()
    session = open_method(engine, folder, make)
    session.resume()
    seen: list[str] = []
    asked = threading.Event()
    copier, name = _copier(session.method)
    copy, before = getattr(copier, name), session.method.before_update

    def slow_copy(*args: Any, **keywords: Any) -> Any:
        assert asked.wait(LIMIT_S), "no update came while the copy was under way"
        time.sleep(0.2)  # an update that does not wait is over by now
        copied = copy(*args, **keywords)
        seen.append("copied")
        return copied

    def asks(group: Any, lr: float) -> None:
        if not asked.is_set():
            seen.append("update asked")
        asked.set()
        before(group, lr)
        seen.append("update")

    for step in (1, 2):
        if step == 2:
            setattr(copier, name, slow_copy)
        session.after_step(step, {"loss": micro.train_step(engine, step)})
    session.method.before_update = asks
    engine.module.register_forward_hook(lambda *_: seen.append("forward"))
    micro.train_step(engine, 3)
    session.method.before_update = before
    setattr(copier, name, copy)
    session.close()
    return seen[:4]


@pytest.mark.parametrize("make", [every_2, dcp_every_2])
def test_forward_and_backward_run_beside_the_copy_and_the_update_waits_for_it(
    make: Any, tmp_path: Path
) -> None:
    (seen,) = run_ranks(1, tmp_path, _slow_copy, str(tmp_path / "run"), make)
    assert seen == ["forward", "update asked", "copied", "update"]


def _late_copy(folder: str, make: Any) -> dict[str, Any]:
    """The copy of step 2 begins only when the update of step 3 has given up waiting for it."""
    engine = micro.build()
    session = open_method(engine, folder, make)
    session.resume()
    method, went_on, alerts = session.method, threading.Event(), []
    copier, name = _copier(method)
    copy = getattr(copier, name)

    def late_copy(*args: Any, **keywords: Any) -> Any:
        assert went_on.wait(LIMIT_S), "training never went on"
        return copy(*args, **keywords)

    for step in range(1, 5):
        setattr(copier, name, late_copy if step == 2 else copy)
        method._wait_s = 0.05 if step == 3 else LIMIT_S
        loss = micro.train_step(engine, step)
        if step == 3:
            went_on.set()
        alerts += session.after_step(step, {"loss": loss}).alerts
    session.close()
    return {"alerts": alerts, "kept": method._committer.store.committed()}


@pytest.mark.parametrize("make", [every_2, dcp_every_2])
def test_a_copy_that_comes_too_late_is_never_committed_and_training_goes_on(
    make: Any, tmp_path: Path
) -> None:
    (found,) = run_ranks(1, tmp_path, _late_copy, str(tmp_path / "run"), make)
    assert found["kept"] == [4]
    (alert,) = found["alerts"]
    assert "step 2 was not saved" in alert
    assert "storage_wait_s" in alert


def _slow_writer(folder: str) -> dict[str, Any]:
    """The write of step 2 ends only when step 4 waits for it."""
    store = SlowStorage(folder, "step-00000002/rank")
    engine = micro.build()
    session = open_method(engine, folder, every_2, store)
    session.resume()
    background, seen = session.method._background, []
    wait = background.wait

    def watched_wait() -> Any:
        if background.busy and not background._running.done():
            seen.append(f"waits after step {engine.global_steps}")
            store.gate.set()
        return wait()

    background.wait = watched_wait
    for step in range(1, 7):
        session.after_step(step, {"loss": micro.train_step(engine, step)})
        if step == 3:
            assert store.waiting.is_set(), "step 3 ended while step 2 was being written"
    session.close()
    return {
        "seen": seen[0],
        "events": session.costs()["events"],
        "kept": session.method._committer.store.committed(),
    }


def test_a_slow_writer_makes_the_next_checkpoint_wait_and_skips_none(tmp_path: Path) -> None:
    (found,) = run_ranks(1, tmp_path, _slow_writer, str(tmp_path / "run"))
    assert found == {"seen": "waits after step 4", "events": 3, "kept": [6, 4]}


def _tuned(folder: str) -> dict[str, Any]:
    first = train(folder, tuned, 8)
    second = train(folder, tuned, 12)
    return {"first": first["costs"], "second": second["costs"]}


@pytest.mark.slow
def test_all_ranks_go_by_one_profile_which_a_recovered_run_does_not_repeat(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, _tuned, str(tmp_path / "run"))
    profiles = [{key: v for key, v in rank["first"].items() if key.startswith("profile_")} for rank in ranks]
    assert profiles[0] == profiles[1]
    assert len(profiles[0]) == 3
    for rank in ranks:
        assert rank["first"]["interval_steps"] == ranks[0]["first"]["interval_steps"]
        assert rank["second"]["interval_steps"] >= rank["first"]["interval_steps"], "it never shrinks"
        assert "profile_step_s" not in rank["second"]


def _one_rank_cannot_write(folder: str) -> dict[str, Any]:
    import torch.distributed as dist

    store = FaultyStorage(folder)
    if dist.get_rank() == 1:
        store.arm("step-00000004/rank")
    found = train(folder, every_2, 6, store=store)
    alerts = [alert for report in found["reports"].values() for alert in report.alerts]
    return {"alerts": alerts, "events": found["costs"]["events"]}


def test_a_storage_that_refuses_one_rank_costs_one_commit_and_no_step(tmp_path: Path) -> None:
    for found in run_ranks(2, tmp_path, _one_rank_cannot_write, str(tmp_path / "run")):
        (alert,) = found["alerts"]
        assert alert.startswith("step 4 was not saved: rank 1: injected")
        assert found["events"] == 2
    kept = sorted(path.parent.name for path in (tmp_path / "run").glob("m/step-*/commit.json"))
    assert kept == ["step-00000002", "step-00000006"]
