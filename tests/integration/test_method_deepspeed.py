"""DeepSpeed's own checkpoints under our commits: exact, and a torn one costs an older one."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.baselines.deepspeed import DeepSpeedCheckpoints
from tests.harness import run_ranks
from tests.integration.methods import train

STEPS = 9


def _make(zero3: Any, committer: Any) -> DeepSpeedCheckpoints:
    return DeepSpeedCheckpoints(zero3, committer, interval_steps=3)


def same(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert left["state"].keys() == right["state"].keys()
    for name, value in left["state"].items():
        np.testing.assert_equal(right["state"][name], value, err_msg=name)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    tmp = tmp_path_factory.mktemp("whole")
    return run_ranks(2, tmp, train, str(tmp / "run"), _make, STEPS)


def test_a_killed_run_ends_in_the_state_of_the_uninterrupted_one(whole: list[Any], tmp_path: Path) -> None:
    folder = str(tmp_path / "run")
    assert run_ranks(2, tmp_path, partial(train, kill_at=8), folder, _make, STEPS) == [None, None]
    resumed = run_ranks(2, tmp_path, partial(train, seed=5), folder, _make, STEPS)
    for before, after in zip(whole, resumed, strict=True):
        assert after["first"] == 7
        assert after["losses"] == {step: before["losses"][step] for step in (7, 8, 9)}
        same(before, after)
