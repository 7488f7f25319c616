"""Real ranks that hang: each ends itself, the store continues at the next step; slow storage is no hang."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from layercheck.integrations.hf import LayerCheckCallback
from layercheck.persistence.storage import LocalStorage
from tests.harness import run_ranks
from tests.integration.ranks import train

HANG_AT, STEPS, HANG_S = 10, 12, 3.0


def _hang(storage: str, hang_at: int) -> Any:
    def stuck(session: Any, step: int) -> None:
        if step == hang_at and dist.get_rank() == dist.get_world_size() - 1:
            time.sleep(600)

    return train(storage, STEPS, each_step=stuck, settings={"hang_s": HANG_S})


def test_a_session_that_makes_no_further_step_ends_its_process(tmp_path: Path) -> None:
    assert run_ranks(1, tmp_path, _hang, str(tmp_path), 1) == [None]


@pytest.mark.slow
def test_all_ranks_end_when_one_hangs_and_training_goes_on_at_the_next_step(tmp_path: Path) -> None:
    assert run_ranks(2, tmp_path, _hang, str(tmp_path), HANG_AT) == [None, None]
    resumed = run_ranks(2, tmp_path, train, str(tmp_path), STEPS)
    assert [rank["first"] for rank in resumed] == [HANG_AT + 1, HANG_AT + 1]
    assert resumed[0]["receipt"]["t_fail"] == HANG_AT


class Slow(LocalStorage):
    """Shards take longer than `hang_s` while `is_slow`."""

    is_slow = False

    def write(self, path: str, chunks: Any) -> None:
        if self.is_slow and "/rank-" in path:
            time.sleep(1.5 * HANG_S)
        super().write(path, chunks)


def _wait_for_storage(storage: str) -> Any:
    store = Slow(f"{storage}/run/layercheck")

    def slow_from_here(session: Any, step: int) -> None:
        store.is_slow = step == HANG_AT  # save_now follows

    return train(
        storage, STEPS, save_at=HANG_AT, each_step=slow_from_here, store=store, settings={"hang_s": HANG_S}
    )


@pytest.mark.slow
def test_ranks_that_wait_for_the_storage_do_not_hang(tmp_path: Path) -> None:
    ranks = run_ranks(2, tmp_path, _wait_for_storage, str(tmp_path))
    assert [max(rank["losses"]) for rank in ranks] == [STEPS, STEPS]


def test_an_evaluation_of_trainer_beats_at_every_batch() -> None:
    beats: list[int] = []
    callback = LayerCheckCallback("storage", "run")
    state: Any = SimpleNamespace(global_step=7)
    unused: Any = None
    callback.on_prediction_step(unused, state, unused)  # an evaluation before training: nothing is watched
    callback._session = SimpleNamespace(watchdog=SimpleNamespace(beat=beats.append))  # type: ignore[assignment]
    callback.on_prediction_step(unused, state, unused)
    assert beats == [7]
