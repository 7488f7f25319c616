"""All records that the coordinator keeps beside the shards: names, text, and how they are read back.

Every JSON record carries `digest`, the xxh3-128 of its canonical text without that key; one without a right
digest counts as absent and is announced. Only `progress` and `receipt` are ever replaced, whole at a time.
"""

import json
import logging
import re
from collections.abc import Iterable
from typing import Any, TypeVar

from pydantic import BaseModel
from xxhash import xxh3_128_hexdigest

from layercheck.coordination import commit_file, object_claims
from layercheck.coordination.commit_file import DamagedCommitError, canonical
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.timer import REAL_TIME, Timer
from layercheck.errors import StorageError, StoreMismatchError
from layercheck.manifest import (
    AttemptRecord,
    BadShard,
    Commit,
    EventId,
    LineageLink,
    Progress,
    RunRecord,
    TrainerState,
)
from layercheck.persistence.damage import is_damage
from layercheck.persistence.storage import TEMP_PREFIX, Storage

log = logging.getLogger(__name__)

RUN_FILE = "run.json"
PROBE_PREFIX = "probe-"
"""Begins the names of the files by which rank 0 asks who else sees the storage."""
_ATTEMPT_NAME = re.compile(r"a(\d{3,})\.json")
_Model = TypeVar("_Model", bound=BaseModel)


class DamagedRecordError(ValueError):
    """A JSON record is not what was written."""


def attempt_file(storage: Storage, attempt: int) -> str:
    """The claim of an attempt; on an object store its name carries the token of who won it."""
    plain = f"attempts/a{attempt:03d}.json"
    return plain if storage.exclusive else object_claims.path(storage, attempt) or plain


def progress_file(attempt: int) -> str:
    """How far an attempt has come."""
    return f"attempts/a{attempt:03d}.progress.json"


def receipt_file(attempt: int) -> str:
    """What its recovery did."""
    return f"attempts/a{attempt:03d}.receipt.json"


# ---------------------------------------------------------------- JSON records


def dump(record: BaseModel | dict[str, Any]) -> bytes:
    """A record as text with its digest. Infinities are written as `Infinity`, which `json` reads back."""
    value = record if isinstance(record, dict) else record.model_dump()
    return canonical(value | {"digest": xxh3_128_hexdigest(canonical(value))}) + b"\n"


def parse(data: bytes) -> dict[str, Any]:
    """The record in a text, without its digest.

    Raises:
        DamagedRecordError: no JSON object, or not the one that its digest was made of.
    """
    try:
        value = json.loads(data)
        digest = value.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError) as error:
        raise DamagedRecordError(f"not readable: {error}") from error
    if digest != xxh3_128_hexdigest(canonical(value)):
        raise DamagedRecordError("its digest does not match its content")
    return dict(value)


def _load(storage: Storage, path: str, kind: type[_Model]) -> _Model:
    return kind.model_validate(parse(storage.read(path)))


def _load_or_note(storage: Storage, path: str, kind: type[_Model], notes: list[str]) -> _Model | None:
    """None for an absent record, and for a damaged one with a note."""
    if storage.size(path) is None:
        return None
    try:
        return _load(storage, path, kind)
    except ValueError as error:  # also pydantic's
        notes.append(f"{path} counts as absent: {error}")
    except StorageError as error:
        if not is_damage(error):
            raise
        notes.append(f"{path} counts as absent: {error.message}")
    return None


def write_run(storage: Storage, run: RunRecord) -> bool:
    """Creates `run.json`; False if the store has one."""
    return storage.create(RUN_FILE, dump(run))


def read_run(storage: Storage) -> RunRecord | None:
    """The run of this store, None for a store without one.

    Raises:
        StoreMismatchError: `run.json` is damaged, or missing beside events: never a fresh start (I7).
    """
    if storage.size(RUN_FILE) is None:
        events = event_folders(storage)
        if not events:
            return None
        if storage.size(RUN_FILE) is None:  # else another submission has begun the run between the two looks
            raise StoreMismatchError(
                f"{storage.root} holds {len(events)} events and no {RUN_FILE}: restore it or use another run",
                path=RUN_FILE,
            )
    try:
        return _load(storage, RUN_FILE, RunRecord)
    except ValueError as error:
        raise StoreMismatchError(
            f"{RUN_FILE} below {storage.root} is damaged ({error}): restore it, or use another run name",
            path=RUN_FILE,
        ) from error


def claim_attempt(storage: Storage, record: AttemptRecord, timer: Timer = REAL_TIME) -> bool:
    """Creates the attempt's record, whole, in one act; False if its number is taken or cannot be had."""
    if storage.exclusive:
        return storage.create(attempt_file(storage, record.attempt), dump(record))
    return object_claims.claim(storage, record.attempt, record.token, dump(record), timer)


def confirm_claim(storage: Storage, record: AttemptRecord, timer: Timer = REAL_TIME) -> bool:
    """Finishes a claim that its maker may have died in; False if its number is somebody else's."""
    return storage.exclusive or object_claims.confirm(storage, record.attempt, record.token, timer)


def read_attempt(storage: Storage, attempt: int) -> AttemptRecord | None:
    """One attempt's claim, None if it is absent or damaged."""
    return _load_or_note(storage, attempt_file(storage, attempt), AttemptRecord, [])


def attempt_numbers(storage: Storage) -> list[int]:
    """All numbers ever claimed, ascending, readable or not."""
    if not storage.exclusive:
        return sorted(object_claims.numbers(storage))
    found = [_ATTEMPT_NAME.fullmatch(name) for name in storage.list("attempts")]
    return sorted(int(match[1]) for match in found if match)


def write_progress(storage: Storage, progress: Progress) -> None:
    """Replaces the progress of an attempt."""
    storage.write(progress_file(progress.attempt), [dump(progress)])


def read_progress(storage: Storage, attempt: int) -> Progress | None:
    """Progress of an attempt, None if there is none that can be read."""
    return _progress(storage, attempt, [])


def _progress(storage: Storage, attempt: int, notes: list[str]) -> Progress | None:
    """Where a rename over a taken name is refused, a crash can leave the finished temp file alone: it counts.

    Its digest says that it is whole.
    """
    found = _load_or_note(storage, progress_file(attempt), Progress, notes)
    if found is not None:
        return found
    temps = [f"attempts/{name}" for name in storage.list("attempts") if name.startswith(TEMP_PREFIX)]
    records = [_load_or_note(storage, path, Progress, []) for path in temps]
    own = [record for record in records if record is not None and record.attempt == attempt]
    return max(own, key=lambda record: record.beat, default=None)


def write_receipt(storage: Storage, attempt: int, receipt: dict[str, Any]) -> None:
    """Replaces the receipt of an attempt."""
    storage.write(receipt_file(attempt), [dump(receipt)])


def read_receipt(storage: Storage, attempt: int) -> dict[str, Any] | None:
    """Receipt of an attempt, None if there is none that can be read."""
    if storage.size(receipt_file(attempt)) is None:
        return None
    try:
        return parse(storage.read(receipt_file(attempt)))
    except DamagedRecordError:
        return None
    except StorageError as error:
        if not is_damage(error):
            raise
        return None


# ---------------------------------------------------------------- blacklist


def blacklist_shard(storage: Storage, bad: BadShard) -> None:
    """Notes a shard that failed its check twice. The same shard twice is one file."""
    name = xxh3_128_hexdigest(canonical([bad.file, bad.layer]))
    storage.write(f"blacklist/shard-{name}.json", [dump(bad)])


def blacklist_plan(storage: Storage, attempt: int, reason: str) -> None:
    """Notes that what this attempt recovered led to a non-finite state (I13)."""
    storage.write(f"blacklist/plan-a{attempt:03d}.json", [dump({"attempt": attempt, "reason": reason})])


def _read_blacklist(storage: Storage, notes: list[str]) -> tuple[tuple[BadShard, ...], frozenset[int]]:
    shards, plans = [], set()
    for name in storage.list("blacklist"):
        path = f"blacklist/{name}"
        if name.startswith("shard-") and (bad := _load_or_note(storage, path, BadShard, notes)):
            shards.append(bad)
        elif match := re.fullmatch(r"plan-a(\d+)\.json", name):
            plans.add(int(match[1]))
    return tuple(shards), frozenset(plans)


# ---------------------------------------------------------------- commits and the whole store


def event_folders(storage: Storage) -> list[EventId]:
    """All events that have a folder, committed or not, in step order."""
    found = [EventId.parse(name) for name in storage.list("events")]
    return sorted((e for e in found if e is not None), key=lambda e: (e.step, e.attempt, e.part))


def write_commit(storage: Storage, commit: Commit, texts: Iterable[bytes] | None = None) -> None:
    """The one write that makes an event exist. All its shards are durable before (I2).

    `texts`: see `commit_file.encode`.
    """
    storage.write(commit.event.commit_file, [commit_file.encode(commit, texts)])


def load_commits(storage: Storage) -> tuple[list[Commit], list[EventId], list[str]]:
    """Reads all commits: in step order, the events whose commit cannot be trusted, a note on each of those.

    From the newest to the oldest: an attempt commits in step order, so whoever sees one commit of a zombie
    sees all its earlier ones, and one step number says what was seen.
    """
    commits, damaged, notes = [], [], []
    for event in reversed(event_folders(storage)):
        if storage.size(event.commit_file) is None:
            continue
        try:
            commits.append(commit_file.decode(storage.read(event.commit_file), event))
        except DamagedCommitError as error:
            damaged.append(event)
            notes.append(f"{event.commit_file} counts as absent: {error}")
        except StorageError as error:
            if is_damage(error):
                damaged.append(event)
                notes.append(f"{event.commit_file} counts as absent: {error.message}")
                continue
            if storage.size(event.commit_file) is not None:
                raise  # not deleted meanwhile: the storage itself refuses
            notes.append(f"{event.commit_file} vanished while it was read: {error.message}")
    return commits[::-1], damaged, notes


def load_facts(storage: Storage) -> StoreFacts:
    """Reads everything but the shards.

    Raises:
        StoreMismatchError: the store has no readable `run.json`.
    """
    run = read_run(storage)
    if run is None:
        raise StoreMismatchError(f"{storage.root} holds no run: check the store path", path=RUN_FILE)
    notes: list[str] = []
    commits, damaged, commit_notes = load_commits(storage)
    numbers = sorted({*attempt_numbers(storage), *(commit.event.attempt for commit in commits)})
    attempts = _read_attempts(storage, numbers, commits, notes)
    progress = {n: _progress(storage, n, notes) for n in numbers}
    receipts = {n: read_receipt(storage, n) for n in numbers}
    bad, bad_plans = _read_blacklist(storage, notes)
    return StoreFacts(
        run=run,
        attempts=attempts,
        highest_attempt=max([*numbers, *(event.attempt for event in event_folders(storage))], default=0),
        commits=tuple(commits),
        damaged=tuple(damaged),
        progress={n: value for n, value in progress.items() if value is not None},
        receipts={n: value for n, value in receipts.items() if value is not None},
        bad=bad,
        bad_plans=bad_plans,
        notes=(*notes, *commit_notes),
    )


def _read_attempts(
    storage: Storage, numbers: list[int], commits: list[Commit], notes: list[str]
) -> dict[int, AttemptRecord]:
    """Readable claims. A damaged one counts as never begun, unless a commit of it repeats what it said.

    Without that exception one flipped bit would make all its commits dead, while those of its predecessor may
    be collected already.
    """
    attempts = {}
    for number in numbers:
        record = _load_or_note(storage, attempt_file(storage, number), AttemptRecord, notes)
        if record is None:
            record = _from_commits(number, commits)
            notes.append(
                f"attempt {number} is known from its commits only"
                if record
                else f"attempt {number} counts as never begun"
            )
        if record is not None:
            attempts[number] = record
    return attempts


def _from_commits(attempt: int, commits: list[Commit]) -> AttemptRecord | None:
    """What the commits of an attempt repeat of its claim; its trainer state at r_b is not among that."""
    own = [commit for commit in commits if commit.event.attempt == attempt]
    if not own:
        return None
    lineage: tuple[LineageLink, ...] = own[-1].lineage
    nothing: TrainerState = {}
    return AttemptRecord(
        attempt=attempt,
        token="",
        submission="",
        world_size=own[-1].records[0].world_size,
        mode="composite",
        r_b=lineage[-1].r_b,
        trainer_state=nothing,
        lineage=lineage,
    )


def settle(storage: Storage) -> None:
    """Makes durable all records that can be seen.

    Whoever renamed a commit may have died before the name was durable. Who goes on from it, deletes what it
    replaces and then loses it in a power cut has lost both.
    """
    for folder in ("attempts", "blacklist", "events", *(event.folder for event in event_folders(storage))):
        storage.settle(folder)


def unfinished(storage: Storage) -> list[str]:
    """Temp names and probes that crashes left. Those in event folders go with their folder."""
    left = [name for name in storage.list("") if name.startswith((TEMP_PREFIX, PROBE_PREFIX))]
    folders = ("attempts", "blacklist", "history")
    return left + [f"{f}/{n}" for f in folders for n in storage.list(f) if n.startswith(TEMP_PREFIX)]
