"""The calls that change a storage, counted: the moments at which a process can die."""

from collections.abc import Callable
from typing import Any, NamedTuple

from tests.fakes import PowerCutError

State = Any
"""What a storage holds, as a value that nobody changes."""


class Event(NamedTuple):
    """One call that changes the storage. `owner` is the process that makes it."""

    owner: str
    call: str
    path: str

    def __str__(self) -> str:
        return f"{self.owner}: {self.call} {self.path}"


class Watch:
    """Sees every event before it happens, and ends its owner there if told so.

    A dead process makes no call any more: handlers and `finally` blocks of the code under test, which a real
    death does not run, find a storage that refuses everything.

    Attributes:
        seen: the events so far.
        on_event: is called with the event's number and how it looks if it gets only half done (None for a
            call that is done or not); whoever records takes his snapshot here.
        kill_at: (number, half done?) of the event at which its owner dies.
        on_call: is called with the owner before each of its calls, for whoever lets time pass in them.
    """

    def __init__(self) -> None:
        self.seen: list[Event] = []
        self.dead: set[str] = set()
        self.on_event: Callable[[int, Callable[[], State] | None], None] | None = None
        self.kill_at: tuple[int, bool] | None = None
        self.on_call: Callable[[str], None] | None = None

    def check(self, owner: str) -> None:
        """Every call begins here, also those that only look."""
        if self.on_call is not None:
            self.on_call(owner)
        if owner in self.dead:
            raise PowerCutError(f"{owner} is dead")

    def enter(self, event: Event, half: Callable[[], State] | None = None) -> bool:
        """An event is about to happen; True if it shall happen by half, and its owner is dead from here."""
        self.check(event.owner)
        number = len(self.seen)
        self.seen.append(event)
        if self.on_event is not None:
            self.on_event(number, half)
        if self.kill_at is None or self.kill_at[0] != number:
            return False
        self.dead.add(event.owner)
        if self.kill_at[1]:
            return True
        raise PowerCutError(str(event))

    def end_of_life(self, owner: str) -> PowerCutError:
        """What to raise after an event that happened by half."""
        return PowerCutError(f"{owner} died in it")
