"""Full-state methods: a killed run ends bit for bit in the state of the run that nothing disturbed."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.baselines.settings import CheckFreqSettings
from layercheck.zero3 import Zero3Engine
from tests import micro
from tests.fakes import flip_bit
from tests.harness import run_ranks
from tests.integration.methods import train

STEPS, KILL_AT, EVERY = 9, 8, 3


def deepspeed(zero3: Any, committer: Any) -> Any:
    from app.baselines.deepspeed import DeepSpeedCheckpoints

    return DeepSpeedCheckpoints(zero3, committer, EVERY)


def dcp_async(zero3: Any, committer: Any) -> Any:
    from app.baselines.committer import own_group
    from app.baselines.dcp_async import DcpAsync

    return DcpAsync(zero3, committer, own_group(60), EVERY, 60)


def checkfreq(zero3: Any, committer: Any) -> Any:
    from app.baselines.checkfreq import CheckFreq

    settings = CheckFreqSettings(mode="manual", interval_steps=EVERY)
    return CheckFreq(zero3, committer, settings, 60)


METHODS = (deepspeed, dcp_async, checkfreq)


def _undisturbed(steps: int) -> dict[str, Any]:
    """The same training with no session at all."""
    from tests.integration.methods import state_of

    engine = micro.build()
    losses = {step: micro.train_step(engine, step) for step in range(1, steps + 1)}
    return {"losses": losses, "state": state_of(Zero3Engine(engine))}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(2, tmp_path_factory.mktemp("whole"), _undisturbed, STEPS)


def _assert_same_end(undisturbed: list[Any], resumed: list[Any], first: int) -> None:
    for before, after in zip(undisturbed, resumed, strict=True):
        assert after["first"] == first
        assert after["losses"] == {step: before["losses"][step] for step in range(first, STEPS + 1)}
        assert before["state"].keys() == after["state"].keys()
        for name, value in before["state"].items():
            np.testing.assert_equal(after["state"][name], value, err_msg=name)


@pytest.mark.parametrize("make", METHODS)
def test_a_killed_run_ends_in_the_state_of_an_undisturbed_one(
    make: Any, undisturbed: list[Any], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    killed = run_ranks(2, tmp_path, partial(train, kill_at=KILL_AT), str(folder), make, STEPS)
    assert killed == [None, None]
    # The newest commit may still have been on its way: its folder has no record then, or a record to go to.
    committed = sorted(folder.glob("m/step-*/commit.json"))
    newest = int(committed[-1].parent.name[5:])
    assert newest in (3, 6)
    resumed = run_ranks(2, tmp_path, partial(train, seed=5), str(folder), make, STEPS)
    _assert_same_end(undisturbed, resumed, newest + 1)
    receipt = resumed[0]["receipt"]
    assert (receipt["resume_step"], receipt["max_age"]) == (newest + 1, 0)
    # Bit rot in the newest commit costs the older one, and one warning; the end is the same again.
    (kept, last) = sorted(folder.glob("m/step-*"))
    assert last.name == f"step-{STEPS:08d}"
    victim = max((path for path in last.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
    flip_bit(victim, 8 * (victim.stat().st_size // 2))
    again = run_ranks(2, tmp_path, partial(train, seed=6), str(folder), make, STEPS)
    _assert_same_end(undisturbed, again, int(kept.name[5:]) + 1)
