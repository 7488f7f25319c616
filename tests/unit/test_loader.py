import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.loader import Ordered, StepLoader
from app.order import Order
from layercheck.errors import StorageError

ORDER = Order(num_sequences=20, global_batch=8, seed=3)


class Data:
    """Notes what is read, and by which thread."""

    def __init__(self, hook: Callable[[list[int]], None] = lambda _: None) -> None:
        self.read: list[list[int]] = []
        self.threads: set[str] = set()
        self.hook = hook

    def batch(self, indices: list[int]) -> Any:
        self.hook(indices)
        self.read.append(indices)
        self.threads.add(threading.current_thread().name)
        return SimpleNamespace(indices=indices)

    def label_count(self, indices: list[int]) -> int:
        return int(np.sum(indices))


def loader(data: Data, last_step: int = 6, wait_s: float = 20) -> StepLoader:
    return StepLoader(
        Ordered(data, ORDER),  # type: ignore[arg-type]
        rank=1,
        world_size=2,
        micro_batch=2,
        last_step=last_step,
        wait_s=wait_s,
    )


def test_a_step_gets_what_its_number_says_in_turn_and_out_of_turn() -> None:
    for steps in ([1, 2, 3, 4, 5, 6], [4, 5, 2, 2, 6, 1]):
        reads = loader(Data())
        for step in steps:
            data = reads.take(step)
            mine = ORDER.rank_indices(step, 1, 2)
            assert [batch.indices for batch in data.batches] == [mine[:2], mine[2:]]
            assert data.num_labels == sum(ORDER.step_indices(step)) / 4
        reads.close()


def test_the_next_step_is_read_while_this_one_computes_and_none_beyond_the_last() -> None:
    arrived = threading.Event()
    second = ORDER.rank_indices(2, 1, 2)[2:]
    data = Data(lambda indices: arrived.set() if indices == second else None)
    reads = loader(data, last_step=2)
    reads.take(1)
    assert arrived.wait(20), "step 2 was read without being asked for"
    reads.take(2)
    reads._thread.shutdown(wait=True)  # what was asked for is read to its end, unlike with `close`
    assert data.read == [part for step in (1, 2) for part in _parts(step)], "each once, in order"
    assert threading.current_thread().name not in data.threads


def _parts(step: int) -> list[list[int]]:
    mine = ORDER.rank_indices(step, 1, 2)
    return [mine[:2], mine[2:]]


def test_an_error_of_the_reading_thread_is_raised_by_the_step_that_needs_it() -> None:
    def broken(indices: list[int]) -> None:
        if indices == _parts(2)[0]:
            raise OSError("stale file handle")

    reads = loader(Data(broken))
    reads.take(1)
    with pytest.raises(OSError, match="stale"):
        reads.take(2)
    reads.close()


def test_a_read_that_hangs_is_one_error_that_names_step_and_knob() -> None:
    release = threading.Event()
    reads = loader(Data(lambda _: release.wait(20) and None), wait_s=0.05)
    with pytest.raises(StorageError, match=r"data of step 3 .*data\.wait_s=0\.05 s: .*\(data\.cache\), or"):
        reads.take(3)
    reads.close()
    release.set()
