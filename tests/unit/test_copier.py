"""Copies in a thread: when they are made, who waits, and what is told of one that came too late."""

import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch

from layercheck.errors import StorageError
from layercheck.persistence.copier import ThreadCopier


class Gated:
    """A copier whose thread stands until `gate` is set."""

    def __init__(self, wait_s: float) -> None:
        self.copier, self.gate = ThreadCopier(wait_s), threading.Event()
        self.copier._thread.submit(self.gate.wait, 20)
        self.source, self.target = torch.arange(4.0), torch.zeros(4)

    def queue(self) -> object:
        with self.copier.copying():
            self.copier.copy(self.target, self.source)
            return self.copier.mark()


@pytest.fixture
def gated() -> Iterator[Gated]:
    made = Gated(wait_s=20.0)
    yield made
    made.gate.set()
    made.copier.close()


def test_the_update_waits_for_the_copy_and_the_wait_is_told_once(gated: Gated) -> None:
    marked = gated.queue()
    assert gated.target.sum() == 0, "the copy was made in the training thread"
    updated = threading.Event()

    def update() -> None:
        gated.copier.hold_back()
        gated.source.zero_()
        updated.set()

    trainer = threading.Thread(target=update)
    trainer.start()
    early = updated.wait(0.1)
    gated.gate.set()
    trainer.join(20)
    assert not early
    marked.wait(1)  # type: ignore[attr-defined]
    assert gated.target.tolist() == [0, 1, 2, 3]
    assert gated.copier.take_stall_s() > 0.05
    assert gated.copier.take_stall_s() == 0


def test_without_a_new_copy_nobody_waits(gated: Gated) -> None:
    gated.copier.hold_back()
    assert gated.copier.take_stall_s() == 0


def test_a_copy_that_is_late_for_the_update_is_lost_and_the_next_one_is_not() -> None:
    gated = Gated(wait_s=0.01)
    lost = gated.queue()
    gated.copier.hold_back()
    gated.source += 10
    later = gated.queue()
    gated.gate.set()
    with pytest.raises(StorageError, match=r"before the next update of the optimizer \(storage_wait_s\)"):
        lost.wait(20)  # type: ignore[attr-defined]
    later.wait(20)  # type: ignore[attr-defined]
    gated.copier.hold_back()
    assert gated.target.tolist() == [10, 11, 12, 13]
    gated.copier.close()


def test_who_waits_for_a_copy_has_a_limit(gated: Gated) -> None:
    marked = gated.queue()
    started = time.monotonic()
    with pytest.raises(StorageError, match=r"not made within 0\.01 s"):
        marked.wait(0.01)  # type: ignore[attr-defined]
    assert time.monotonic() - started < 10


def test_what_was_broken_off_is_not_copied_with_the_next_mark(gated: Gated) -> None:
    other = torch.zeros(4)
    with suppress(StorageError), gated.copier.copying():
        gated.copier.copy(other, gated.source)
        raise StorageError("no block became free")
    marked = gated.queue()
    gated.gate.set()
    marked.wait(20)  # type: ignore[attr-defined]
    assert other.sum() == 0
    assert gated.target.tolist() == [0, 1, 2, 3]


def test_a_copy_that_fails_tells_whoever_waits_for_it(gated: Gated) -> None:
    with gated.copier.copying():
        gated.copier.copy(torch.zeros(3), gated.source)
        marked = gated.copier.mark()
    gated.gate.set()
    with pytest.raises(StorageError, match="size"):
        marked.wait(20)


@pytest.mark.parametrize("at_once", [False, True])
def test_copies_begin_with_their_mark_only_where_somebody_waits_for_buffers(at_once: bool) -> None:
    copier, source, target = ThreadCopier(20.0), torch.ones(4), torch.zeros(4)
    with copier.copying(at_once):
        copier.copy(target, source)
        marked = copier.mark()
        if at_once:
            marked.wait(20)
        else:
            with pytest.raises(StorageError):
                marked.wait(0.05)
    marked.wait(20)
    assert target.tolist() == source.tolist()
    copier.close()


def test_after_the_end_what_is_queued_is_still_copied(gated: Gated) -> None:
    marked = gated.queue()
    gated.copier.close()
    gated.copier.close()
    gated.gate.set()
    marked.wait(20)  # type: ignore[attr-defined]
    assert gated.target.tolist() == [0, 1, 2, 3]
