"""On is as off (I14), and exact when fresh (I10), at world sizes with and without padding."""

from functools import partial
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, train, train_without_session

AFTER = 20
"""Steps after the save: they come out the same, bit for bit."""


@pytest.mark.parametrize(
    ("world_size", "saved_at"),
    [(3, 13), pytest.param(2, 30, marks=pytest.mark.slow), pytest.param(5, 13, marks=pytest.mark.slow)],
)
def test_i14_and_i10_losses_are_bit_identical_with_a_session_and_after_a_fresh_recovery(
    tmp_path: Path, world_size: int, saved_at: int
) -> None:
    steps = saved_at + AFTER
    reference = run_ranks(world_size, tmp_path, train_without_session, steps)[0]

    watched = run_ranks(world_size, tmp_path, train, str(tmp_path / "on"), steps)[0]
    assert watched["losses"] == reference
    after_warmup = [watched["reports"][step] for step in range(CONFIG["warmup_steps"] + 1, steps + 1)]
    assert sum(report.layers_written for report in after_warmup) > 0
    assert max(report.max_age for report in after_warmup) <= CONFIG["s_max"]

    storage = str(tmp_path / "killed")
    die = partial(train, kill_at=saved_at, save_at=saved_at)
    assert run_ranks(world_size, tmp_path, die, storage, steps) == [None] * world_size
    for result in run_ranks(world_size, tmp_path, partial(train, seed=99), storage, steps):
        assert result["first"] == saved_at + 1
        assert result["receipt"]["max_age"] == 0
        assert result["losses"] == {step: reference[step] for step in range(saved_at + 1, steps + 1)}
