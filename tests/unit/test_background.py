"""The queue of a vault's threads: order, what is taken off it, and what a close leaves undone."""

import threading
from collections.abc import Iterator

import pytest

from layercheck.memory.background import InOrder


class Gated(InOrder[int]):
    """Notes what it did; each item waits for `gate`."""

    def __init__(self) -> None:
        self.gate, self.began, self.done = threading.Semaphore(0), threading.Event(), list[int]()
        super().__init__("gated")

    def _act(self, item: int) -> None:
        self.began.set()
        assert self.gate.acquire(timeout=10)
        self.done.append(item)


@pytest.fixture
def held_up() -> Iterator[Gated]:
    """Item 0 is in work, 1 to 3 wait."""
    made = Gated()
    for item in range(4):
        made.put(item)
    assert made.began.wait(10)
    yield made
    made.gate.release(99)
    made.close(10)


def test_items_are_taken_in_their_order_and_waited_for_by_what_they_are(held_up: Gated) -> None:
    assert not held_up.drain(0.0)
    assert not held_up.drain(0.0, lambda item: item == 0), "it is in work"
    held_up.gate.release()
    assert held_up.drain(10, lambda item: item == 0)
    assert not held_up.drain(0.0, lambda item: item == 3)
    held_up.gate.release(3)
    assert held_up.drain(10)
    assert held_up.done == [0, 1, 2, 3]


def test_what_is_forgotten_is_not_done_unless_it_is_in_work(held_up: Gated) -> None:
    held_up.forget(lambda item: item in (0, 2))
    held_up.gate.release(3)
    assert held_up.drain(10)
    assert held_up.done == [0, 1, 3]


def test_a_close_waits_for_the_item_in_work_and_leaves_the_rest_undone(held_up: Gated) -> None:
    closing = threading.Thread(target=held_up.close, args=(10,))
    closing.start()
    assert held_up.drain(10, lambda item: item > 0), "nobody waits for what is left undone"
    assert not held_up.drain(0.0)
    held_up.gate.release(99)
    closing.join(10)
    assert held_up.done == [0]
