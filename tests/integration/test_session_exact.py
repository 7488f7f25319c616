"""On is as off (I14), and exact when fresh (I10), at world sizes with and without padding."""

from functools import partial
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, train, train_without_session

STEPS, SAVED_AT = 50, 30


@pytest.mark.parametrize("world_size", [2, 3, 5])
def test_i14_and_i10_losses_are_bit_identical_with_a_session_and_after_a_fresh_recovery(
    tmp_path: Path, world_size: int
) -> None:
    reference = run_ranks(world_size, tmp_path, train_without_session, STEPS)[0]

    watched = run_ranks(world_size, tmp_path, train, str(tmp_path / "on"), STEPS)[0]
    assert watched["losses"] == reference
    after_warmup = [watched["reports"][step] for step in range(CONFIG["warmup_steps"] + 1, STEPS + 1)]
    assert sum(report.layers_written for report in after_warmup) > 0
    assert max(report.max_age for report in after_warmup) <= CONFIG["s_max"]

    storage = str(tmp_path / "killed")
    die = partial(train, kill_at=SAVED_AT, save_at=SAVED_AT)
    assert run_ranks(world_size, tmp_path, die, storage, STEPS) == [None] * world_size
    for result in run_ranks(world_size, tmp_path, partial(train, seed=99), storage, STEPS):
        assert result["first"] == SAVED_AT + 1
        assert result["receipt"]["max_age"] == 0
        assert result["losses"] == {step: reference[step] for step in range(SAVED_AT + 1, STEPS + 1)}
