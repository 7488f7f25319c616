"""The books of an attempt that commits for weeks: final events are forgotten, never their meaning."""

import pytest

from layercheck.coordination import events
from layercheck.coordination.events import EventBook
from layercheck.manifest import EventId, ShardRecord

ROWS = (
    ShardRecord(
        layer="norm", step=1, attempt=1, rank=0, world_size=1, file="f", begin=0, end=1, xxh3_128="x",
        drift=1.0, threshold=1.0, age=1, reason="drift", snapshot_s=0.0, write_s=0.0,
    ),
)  # fmt: skip


def _event(step: int) -> EventId:
    return EventId(step=step, attempt=1)


def _committed(book: EventBook, step: int) -> None:
    book.add(_event(step), 0, ROWS, {"step": step}, 0.0)
    entry = book.next_complete(0.0)
    assert entry is not None
    book.commit(entry.event)


def test_a_book_of_many_events_remembers_the_newest_and_counts_all() -> None:
    book = EventBook(1, 1)
    many = 2 * events.REMEMBERED
    for step in range(1, many + 1):
        _committed(book, step)
    for step in range(many + 1, many + events.REMEMBERED + 100):
        book.lose(_event(step), "a test")
    assert (book.num_committed, book.newest_committed) == (many, (many, 0))
    assert (book.num_lost, len(book.lost)) == (events.REMEMBERED + 99, events.REMEMBERED)
    assert sum(len(value) for value in vars(book).values() if hasattr(value, "__len__")) < 3 * many


def test_a_call_about_a_committed_event_changes_nothing_even_once_it_is_forgotten() -> None:
    book = EventBook(1, 1)
    for step in range(1, events.REMEMBERED + 10):
        _committed(book, step)
    for step in (1, 5, events.REMEMBERED + 1, events.REMEMBERED + 9):
        book.add(_event(step), 0, ROWS, {"step": step}, 0.0)
        book.rank_lost(_event(step), 0, "a late word")
        book.expect([step], 0.0)
    assert (book.open, book.lost) == ({}, {})


def test_an_event_that_comes_after_a_later_commit_is_lost_while_that_is_known() -> None:
    book = EventBook(1, 1)
    _committed(book, 1)
    _committed(book, 3)
    book.add(_event(2), 0, ROWS, {"step": 2}, 0.0)
    assert book.lost_steps == (2,)
    assert book.num_lost == 1


def test_an_expected_event_of_which_a_part_is_known_is_not_expected_again() -> None:
    book = EventBook(1, 2)
    book.add(EventId(step=4, attempt=1, part=1), 0, ROWS, {"step": 4}, 0.0)
    book.expect([4, 7], 0.0)
    assert list(book.open) == [EventId(step=4, attempt=1, part=1), _event(7)]


@pytest.mark.parametrize("other", [{"base_step": 2}, {"base_attempt": 2}])
def test_i3_residuals_of_different_versions_do_not_commit(other: dict[str, int]) -> None:
    """Added to either version, the weights of one rank would be those of no step."""
    book, event = EventBook(1, 2), _event(5)
    mine = ROWS[0].model_copy(
        update={"reason": "residual", "kind": "residual", "base_step": 3, "base_attempt": 1}
    )
    book.add(event, 0, (mine,), {"step": 5}, 0.0)
    book.add(event, 1, (mine.model_copy(update={"rank": 1} | other),), {"step": 5}, 0.0)
    assert book.lost == {event: "ranks 0 and 1 saved different layers"}
    book.add(_event(6), 0, (mine,), {"step": 6}, 0.0)
    book.add(_event(6), 1, (mine.model_copy(update={"rank": 1}),), {"step": 6}, 0.0)
    assert _event(6) in book.open
