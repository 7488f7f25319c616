"""The crash matrix: `python -m tests.crash.matrix [--json FILE]` -> `{cases, correct, failures: [...]}`.

One run of two ranks is recorded call by call: two lives with a warm-up, selective and full events, journal,
collection, a rotten byte, an amended plan, receipts and metrics. Then, for each call that changes storage:

- `crash`: everything dies before the call, and by half in it; the next life starts from storage alone.
- `power`: the same, and of what was not fsynced some is gone or torn.
- `alone`: only the process that makes the call dies. A dead rank is followed by a new attempt of the living
  coordinator; a dead coordinator is built anew and asked again by the living ranks, and at the end of
  the run the power goes: what the new one said is committed must be there.
- `late`: a PUT arrives at the object store after its sender died, while the next life is under way.
- `twice`: the recovery of a crash is recorded too, and dies at its own calls (a sample of both).

Each life that comes after is checked by the oracle, without any manual step.
"""

import argparse
import json
import random
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.crash import disk
from tests.crash.bucket import Bucket
from tests.crash.disk import Disk, after_power_cut, is_settled
from tests.crash.events import State
from tests.crash.lives import COORDINATOR, FIRST_LIFE, SECOND_LIFE, Medium, World, live, recover
from tests.crash.oracle import Oracle
from tests.fakes import PowerCutError

MEDIA: dict[str, Callable[[State], Medium]] = {
    "disk": lambda state: Disk(state),
    "disk that refuses to rename over a name": lambda state: Disk(state, "refused"),
    "disk that renames in two steps": lambda state: Disk(state, "in two steps"),
    "object store": lambda state: Bucket(state),
}
ROTTEN = "norm"
_RANDOM_CUTS = 4
_LATE_CALLS = (1, 3, 4, 6, 9, 14)
_TEMP = re.compile(r"\.tmp-[0-9a-f-]+")


@dataclass(frozen=True, slots=True)
class Sample:
    """Which part of the cases is played.

    Every n-th moment for a crash and a power cut, for a death alone, and for the first of two deaths, of
    whose recovery every n-th call is the second.
    """

    moments: int = 1
    alone: int = 3
    twice: int = 7
    calls: int = 7


SAMPLES = {
    "disk": Sample(),
    "disk that refuses to rename over a name": Sample(4, 8, 20),
    "disk that renames in two steps": Sample(4, 8, 20),
    "object store": Sample(alone=1, twice=10),
}
THOROUGH = Sample(1, 1, 1, 2)


@dataclass(frozen=True, slots=True)
class Moment:
    """Just before (or half way through) one call: all that outlives the death of every process."""

    name: str
    number: int
    half: bool
    state: State
    oracle: Oracle
    tokens: int
    now: float
    on_its_way: tuple[str, bytes] | None = None


@dataclass(slots=True)
class Tally:
    """What the cases gave. `seen` are situations that were played through already: they count, but not twice
    in time."""

    cases: int = 0
    correct: int = 0
    failures: list[dict[str, str]] = field(default_factory=list)
    by_kind: dict[str, int] = field(default_factory=dict)
    seen: dict[Any, str | None] = field(default_factory=dict)

    def count(self, kind: str, name: str, error: str | None) -> None:
        self.cases += 1
        self.by_kind[kind] = self.by_kind.get(kind, 0) + 1
        if error is None:
            self.correct += 1
        else:
            self.failures.append({"case": f"{kind}: {name}", "error": error})


# ---------------------------------------------------------------- recording


def story(world: World) -> None:
    """The run that is recorded: two lives, a byte that rots between them."""
    live(world, FIRST_LIFE)
    rot(world)
    live(world, SECOND_LIFE).end()


def rot(world: World) -> None:
    """One byte of the newest version of a layer, the last one in its file, changes on the medium."""
    step, attempt = world.oracle.rot(ROTTEN)
    path = f"/shared/runs/r1/layercheck/events/step-{step:08d}.a{attempt:03d}/rank-00001.safetensors"
    if isinstance(world.medium, Disk):
        world.medium.nodes = disk.flipped(world.medium.nodes, path, -1)
    else:
        data = world.medium.objects[path]
        world.medium.objects[path] = data[:-1] + bytes([data[-1] ^ 0x40])


def record(world: World, play: Callable[[World], Any]) -> list[Moment]:
    """Plays it once, without a crash, and returns every moment at which one could come."""
    moments: list[Moment] = []
    watch = world.medium.watch
    first = len(watch.seen)

    def moment(number: int, how: str, state: State) -> Moment:
        name = f"{how} {number} ({_TEMP.sub('.tmp', str(watch.seen[number]))})"
        sent = world.medium.on_its_way if isinstance(world.medium, Bucket) else None
        outlived = (world.oracle.copy(), world.tokens, world.clock.now)
        return Moment(name, number, how == "half of", state, *outlived, sent)

    def on_event(number: int, half: Callable[[], State] | None) -> None:
        moments.append(moment(number, "before", world.medium.state()))
        if half is not None:
            moments.append(moment(number, "half of", half()))

    watch.on_event = on_event
    play(world)
    watch.on_event = None
    if len(watch.seen) > first:
        moments.append(moment(len(watch.seen) - 1, "after", world.medium.state()))
    return moments


def world_at(moment: Moment, state: State, make: Callable[[State], Medium]) -> World:
    """The world as the next life finds it."""
    world = World(make(state), moment.oracle.copy(), moment.tokens)
    world.clock.now = moment.now
    return world


# ---------------------------------------------------------------- the kinds of cases


def aftermaths(moment: Moment, medium: str, seed: int) -> Iterator[tuple[str, str, State]]:
    """(kind, name, state) of everything that may be found after all processes died at a moment."""
    yield "crash", "as it was", moment.state
    if medium == "object store" or is_settled(moment.state):
        return
    yield "power", "nothing unsynced is there", after_power_cut(moment.state, lambda n: 0)
    yield "power", "all is there, data torn", after_power_cut(moment.state, lambda n: 1 if n == 4 else n - 1)
    yield (
        "power",
        "all names are there, data zero",
        after_power_cut(moment.state, lambda n: 2 if n == 4 else n - 1),
    )
    yield "power", "renamed under both names", after_power_cut(moment.state, lambda n: 1)
    for number in range(_RANDOM_CUTS):
        rng = random.Random(f"{seed} {number}")
        yield "power", f"random {number}", after_power_cut(moment.state, rng.randrange)


def play_all(medium: str, tally: Tally, sample: Sample) -> None:
    """The cases of one medium."""
    make = MEDIA[medium]
    moments = record(World(make(None)), story)
    for index, moment in enumerate(moments[:: sample.moments]):
        for kind, how, state in aftermaths(moment, medium, index):
            name = f"{medium}: {moment.name}, {how}"
            tally.count(kind, name, _played(tally, moment, state, make))
    # A second death matters most where the first left a name that is seen and not durable.
    firsts = [moment for moment in moments if "fsync folder" in moment.name] or moments
    for index, moment in enumerate(firsts[:: sample.twice]):
        play_twice(medium, tally, moment, index, sample.calls)
    for moment in moments[: -1 : sample.alone]:
        tally.count("alone", f"{medium}: {moment.name}", play_alone(make, moment))
    for moment in moments[: -1 : sample.moments]:
        for call in _LATE_CALLS if moment.on_its_way else ():
            name = f"{medium}: {moment.name}, arrives at call {call}"
            tally.count("late", name, play_late(make, moment, call))


def play_twice(medium: str, tally: Tally, moment: Moment, seed: int, every: int) -> None:
    """A second death at the calls of the recovery from the first."""
    make = MEDIA[medium]
    first, moments = world_at(moment, moment.state, make), []
    if attempt(lambda: moments.extend(record(first, recover))) is not None:
        return  # a failure of the first death, and counted as one
    for index, second in enumerate(moments[seed % every :: every]):
        options = list(aftermaths(second, medium, index))
        for chosen in sorted({1 % len(options), index % len(options)}):
            _, how, state = options[chosen]
            name = f"{medium}: {moment.name}, then {second.name}, {how}"
            tally.count("twice", name, _played(tally, second, state, make))


def _played(tally: Tally, moment: Moment, state: State, make: Callable[[State], Medium]) -> str | None:
    """None if the next life is right, else what was wrong. The same situation is played once."""
    key = (_content(state), moment.oracle.key(), make)
    if key not in tally.seen:
        tally.seen[key] = attempt(lambda: recover(world_at(moment, state, make)))
    return tally.seen[key]


def play_alone(make: Callable[[State], Medium], moment: Moment) -> str | None:
    """The owner of one call dies in it, everybody else lives on."""
    world = World(make(None), restarts_coordinator=True)
    world.medium.watch.kill_at = (moment.number, moment.half)

    def play() -> None:
        try:
            story(world)
        except PowerCutError:
            assert COORDINATOR not in world.medium.watch.dead
            world.medium.watch.dead.clear()
            recover(world, world.coordinator)
        else:
            if isinstance(world.medium, Disk):
                world.medium.nodes = after_power_cut(world.medium.nodes, lambda n: 0)
            recover(world)

    return attempt(play)


def play_late(make: Callable[[State], Medium], moment: Moment, call: int) -> str | None:
    """All died, and what the last one had sent arrives just before a call of the next life."""
    world = world_at(moment, moment.state, make)
    assert isinstance(world.medium, Bucket)
    assert moment.on_its_way is not None
    objects, (path, data) = world.medium.objects, moment.on_its_way

    def on_event(number: int, _: object) -> None:
        if number == call:
            objects[path] = data

    world.medium.watch.on_event = on_event
    return attempt(lambda: recover(world, tidy=False))


def attempt(play: Callable[[], Any]) -> str | None:
    """Runs it; any exception at all is a wrong answer."""
    try:
        play()
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
    return None


def _content(state: State) -> Any:
    """Equal for storages that hold the same under the same names, whatever the temp names are."""
    named = disk.files(state) if 0 in state else state
    return tuple(sorted((_TEMP.sub(".tmp", path), data) for path, data in named.items()))


# ---------------------------------------------------------------- command


def run_matrix(media: list[str] | None = None, sample: Sample | None = None) -> Tally:
    """Plays the cases of all media."""
    tally = Tally()
    for medium in media or list(MEDIA):
        play_all(medium, tally, sample or SAMPLES[medium])
    return tally


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.matrix", description=__doc__.split("\n")[0])
    parser.add_argument("--json", metavar="FILE", help="write the result there")
    parser.add_argument("--medium", choices=list(MEDIA), action="append", help="only this one (repeatable)")
    parser.add_argument("--thorough", action="store_true", help="every moment in every way: many minutes")
    arguments = parser.parse_args()
    tally = run_matrix(arguments.medium, THOROUGH if arguments.thorough else None)
    result = {"cases": tally.cases, "correct": tally.correct, "failures": tally.failures}
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(result, indent=1) + "\n")
    for failure in tally.failures[:20]:
        print(f"{failure['case']}\n    {failure['error']}")
    kinds = ", ".join(f"{count} {kind}" for kind, count in tally.by_kind.items())
    print(f"{tally.correct} of {tally.cases} cases correct ({kinds}; {len(tally.seen)} different situations)")
    return int(tally.correct != tally.cases)


if __name__ == "__main__":
    sys.exit(main())
