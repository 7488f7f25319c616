"""Commits of the roll-back methods: the same record, checks and collection for all of them.

    <run>/<method>/step-00000120/       one commit
        <files of the ranks>
        commit.json                     written last: step, trainer state, size and checksum of every file

A folder without a readable `commit.json` is no commit: its writer died. A commit of which a file is missing,
short or has another checksum is torn and passed over. Nothing fences a worker group off: Ray Train ends the
old one before it starts the next, and a late file of it would not have the checksum of the record.
"""

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Literal

from pydantic import Field, ValidationError
from xxhash import xxh3_128, xxh3_128_hexdigest

from layercheck.errors import DamagedShardError
from layercheck.manifest import Record, TrainerState
from layercheck.persistence.file_calls import Buffer
from layercheck.persistence.storage import Storage

RECORD = "commit.json"
BLOCK_BYTES = 8 << 20


class FileRecord(Record):
    """One file of a commit; `name` is below the commit's folder."""

    name: str
    nbytes: int = Field(ge=0)
    xxh3_128: str


class Tally(Record):
    """Commits of one kind since the run began, deleted ones included; bytes of all ranks."""

    events: int = 0
    nbytes: int = 0
    layer_writes: int = 0

    def plus(self, nbytes: int, layers: int) -> "Tally":
        """With one more commit."""
        return Tally(
            events=self.events + 1, nbytes=self.nbytes + nbytes, layer_writes=self.layer_writes + layers
        )


class Commit(Record):
    """`commit.json`. Everything in it is covered by its digest.

    Attributes:
        kind: why or of what it is (`interval`, `last`, `base`, ...).
        state: the trainer state of `step`.
        files: for each rank its files, in rank order.
        tallies: by kind, this commit included.
    """

    format: Literal[1] = 1
    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    kind: str
    world_size: int = Field(ge=1)
    state: TrainerState
    files: tuple[tuple[FileRecord, ...], ...]
    tallies: dict[str, Tally] = Field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Bytes of all ranks."""
        return sum(file.nbytes for files in self.files for file in files)

    def to_json(self) -> bytes:
        """The record with its digest."""
        content = self.model_dump(mode="json")
        return json.dumps({**content, "digest": _digest(content)}, indent=1).encode()

    @classmethod
    def from_json(cls, raw: bytes, path: str) -> "Commit":
        """Reads and checks a record.

        Raises:
            DamagedShardError: it is not what was written.
        """
        try:
            content = json.loads(raw)
            digest = content.pop("digest")
            if digest != _digest(content):
                raise ValueError("its digest does not match")
            return cls.model_validate(content)
        except (ValueError, KeyError, TypeError, AttributeError, ValidationError) as error:
            raise DamagedShardError(f"{path} is damaged: {error}", path=path) from error


def _digest(content: dict[str, object]) -> str:
    return xxh3_128_hexdigest(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())


class CommitStore:
    """The commits of one kind of folder of one method. No collectives; any thread, one at a time.

    Args:
        storage: the folder of the run.
        method: the folder below it.
        prefix: begins the name of each commit's folder.
    """

    def __init__(self, storage: Storage, method: str, prefix: str = "step") -> None:
        self.storage = storage
        self.method = method
        self._prefix = prefix

    def folder(self, step: int) -> str:
        """Path of a commit's folder below the folder of the run."""
        return f"{self.method}/{self._prefix}-{step:08d}"

    def folders(self) -> list[int]:
        """Steps of all folders, with a record or without, oldest first."""
        matches = [
            re.fullmatch(rf"{self._prefix}-(\d{{8,}})", name) for name in self.storage.list(self.method)
        ]
        return sorted(int(match[1]) for match in matches if match)

    def committed(self) -> list[int]:
        """Steps of the folders that have a record, newest first; whether they are whole is not looked at."""
        steps = reversed(self.folders())
        return [step for step in steps if self.storage.size(f"{self.folder(step)}/{RECORD}") is not None]

    def read(self, step: int) -> Commit:
        """The record of a commit.

        Raises:
            DamagedShardError: it is missing or not what was written.
        """
        path = f"{self.folder(step)}/{RECORD}"
        if self.storage.size(path) is None:
            raise DamagedShardError(f"{path} is missing", path=path)
        commit = Commit.from_json(self.storage.read(path), path)
        if commit.step != step:
            raise DamagedShardError(f"{path} is the record of step {commit.step}", path=path)
        return commit

    def write(self, commit: Commit) -> None:
        """Writes the record: from here on the commit exists."""
        self.storage.write(f"{self.folder(commit.step)}/{RECORD}", [commit.to_json()])

    def delete(self, step: int) -> None:
        """Deletes a commit, its record first: a crash in between leaves a folder that is no commit."""
        self.storage.delete(f"{self.folder(step)}/{RECORD}")
        self.storage.delete(self.folder(step))

    def keep_newest(self, keep: int) -> None:
        """Deletes all but the newest `keep` commits, and older folders that are none."""
        kept = self.committed()[:keep]
        for step in self.folders():
            if len(kept) == keep and step < kept[-1]:
                self.delete(step)

    def roll_back_to(self, step: int) -> None:
        """Deletes what is newer: torn commits, folders without a record. The run goes on after `step`."""
        for newer in self.folders():
            if newer > step:
                self.delete(newer)

    # ------------------------------------------------------------------ files

    def write_file(self, step: int, name: str, chunks: Iterable[Buffer]) -> FileRecord:
        """Writes one whole file, hashing the bytes as they pass; durable at return."""
        content = _Hashed(chunks)
        self.storage.write(f"{self.folder(step)}/{name}", content)
        return FileRecord(name=name, nbytes=content.nbytes, xxh3_128=content.digest.hexdigest())

    def adopt_file(self, step: int, name: str) -> FileRecord:
        """Makes a file durable that somebody else has written with plain file calls, and hashes it.

        The store has to be a local folder. The folder's own entry is left to `settle`.
        """
        digest, nbytes = xxh3_128(), 0
        with open(f"{self.storage.root}/{self.folder(step)}/{name}", "rb") as file:
            os.fsync(file.fileno())
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                nbytes += len(block)
        return FileRecord(name=name, nbytes=nbytes, xxh3_128=digest.hexdigest())

    def settle(self, step: int, below: str = "") -> None:
        """Makes the names in a commit's folder durable, or in one below it."""
        self.storage.settle(f"{self.folder(step)}/{below}" if below else self.folder(step))

    def read_file(self, step: int, file: FileRecord, into: memoryview) -> None:
        """Reads a whole file into `into` and checks it.

        Raises:
            DamagedShardError: it is missing, has another size or another checksum.
        """
        self._checked(step, file, lambda begin, count: into[begin : begin + count])

    def check_file(self, step: int, file: FileRecord) -> None:
        """Reads a file and checks it; keeps nothing of it.

        Raises:
            DamagedShardError: as `read_file`.
        """
        room = memoryview(bytearray(min(BLOCK_BYTES, file.nbytes)))
        self._checked(step, file, lambda begin, count: room[:count])

    def _checked(self, step: int, file: FileRecord, room: Callable[[int, int], memoryview]) -> None:
        path = f"{self.folder(step)}/{file.name}"
        size = self.storage.size(path)
        if size != file.nbytes:
            raise DamagedShardError(f"{path} has {size} bytes, its commit says {file.nbytes}", path=path)
        digest = xxh3_128()
        for begin in range(0, file.nbytes, BLOCK_BYTES):
            block = room(begin, min(BLOCK_BYTES, file.nbytes - begin))
            self.storage.read_into(path, begin, block)
            digest.update(block)
        if digest.hexdigest() != file.xxh3_128:
            raise DamagedShardError(
                f"{path}: its checksum is {digest.hexdigest()}, not {file.xxh3_128}", path=path
            )


class _Hashed:
    """Chunks, hashed and counted as they pass; starts anew with each iteration."""

    def __init__(self, chunks: Iterable[Buffer]) -> None:
        self._chunks = chunks
        self.nbytes, self.digest = 0, xxh3_128()

    def __iter__(self) -> Iterator[Buffer]:
        self.nbytes, self.digest = 0, xxh3_128()
        for chunk in self._chunks:
            self.digest.update(chunk)
            self.nbytes += len(chunk)
            yield chunk


def read_tallies(storage: Storage, method: str) -> dict[str, Tally]:
    """What a run of this method has committed so far: the newest record of each kind of folder tells it."""
    kinds = {match[1] for name in storage.list(method) if (match := re.fullmatch(r"(\w+)-\d{8,}", name))}
    found: dict[str, Tally] = {}
    for kind in sorted(kinds):
        store = CommitStore(storage, method, kind)
        for step in store.committed():
            try:
                found |= store.read(step).tallies
            except DamagedShardError:
                continue  # whoever recovers announces it; a summary goes on
            break
    return found
