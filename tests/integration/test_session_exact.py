"""On is as off (I14), and exact when fresh (I10), at world sizes with and without padding."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

import layercheck
from tests import micro
from tests.harness import run_ranks

STEPS, SAVED_AT = 50, 30
CONFIG = {
    "warmup_steps": 8,
    "warmup_full_every": 4,
    "s_max": 16,
    "target_interval": 5,
    "full_every": 0,
    "embedding_factor": 2,
}


def open_session(engine: Any, storage: str, **extra: Any) -> Any:
    return layercheck.attach(engine, storage, "run", CONFIG, submission="one", **extra)


def _without_session() -> list[float]:
    engine = micro.build()
    return [micro.train_step(engine, step) for step in range(1, STEPS + 1)]


def _with_session(storage: str) -> tuple[list[float], set[str], int]:
    engine = micro.build()
    session = open_session(engine, storage)
    assert session.resume().step == 1
    losses, written = [], 0
    for step in range(1, STEPS + 1):
        losses.append(micro.train_step(engine, step))
        report = session.after_step(step, {"loss": losses[-1]})
        written += report.layers_written if step > CONFIG["warmup_steps"] else 0
        assert report.max_age <= CONFIG["s_max"]
    session.close()
    return losses, set(), written


def _save_and_die(storage: str) -> None:
    engine = micro.build()
    session = open_session(engine, storage)
    session.resume()
    for step in range(1, SAVED_AT + 1):
        loss = micro.train_step(engine, step)
        session.after_step(step, {"loss": loss})
    session.save_now()
    os.kill(os.getpid(), signal.SIGKILL)


def _recover(storage: str) -> tuple[int, list[float], dict[str, Any]]:
    engine = micro.build(seed=99)
    session = open_session(engine, storage)
    point = session.resume()
    losses = []
    for step in range(point.step, STEPS + 1):
        losses.append(micro.train_step(engine, step))
        session.after_step(step, {"loss": losses[-1]})
    session.close()
    return point.step, losses, point.receipt.model_dump()


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_i14_and_i10_losses_are_bit_identical_with_a_session_and_after_a_fresh_recovery(
    tmp_path: Path, world_size: int
) -> None:
    reference = run_ranks(world_size, tmp_path, _without_session)[0]
    losses, _, written = run_ranks(world_size, tmp_path, _with_session, str(tmp_path / "on"))[0]
    assert losses == reference
    assert written > 0
    assert run_ranks(world_size, tmp_path, _save_and_die, str(tmp_path / "killed")) == [None] * world_size
    for first, after, receipt in run_ranks(world_size, tmp_path, _recover, str(tmp_path / "killed")):
        assert first == SAVED_AT + 1
        assert receipt["max_age"] == 0
        assert after == reference[SAVED_AT:]
