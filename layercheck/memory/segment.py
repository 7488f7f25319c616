"""One segment: a rank's file of one event in shared memory. Layout, states, and what a crash leaves.

A file below /dev/shm: `<header, zeros up to 4096><the shard file><meta><offers>`. The header holds a mark,
the sizes of file and meta, and the xxh3-128 of the meta (JSON, `Held.meta`); offers are tokens of 16 bytes,
appended one by one. States:
1. `create`: all pages are reserved, so that nobody runs out of memory in the middle. The header is zero.
   Pages of a segment that has had its time are taken over: to clear new ones takes about as long as a copy.
2. `fill`: the bytes of the shard file, by the rank's writer.
3. `seal`: the meta, then the header in one write. A writer that dies before leaves a torn segment: its header
   is still zero, or the meta is not the one it names. The checksums of the bytes are in the meta's rows.
4. `offer`: an attempt that is being planned was told of it. A torn offer is none.
"""

import json
import os
import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress

from pydantic import ValidationError
from xxhash import xxh3_128_digest

from layercheck.errors import VaultError
from layercheck.memory.held import Held
from layercheck.persistence.file_calls import Buffer
from layercheck.persistence.file_calls import fill as fill_views

DATA_AT = 4096
_MARK = b"LCSEGM01"
_HEADER = struct.Struct("<8sQQ16s")
_OFFER_BYTES = 16
_CHUNK_BYTES = 4 << 20
_MAX_META_BYTES = 100_000_000


def create(path: str, nbytes: int, spare: str | None = None) -> None:
    """An empty segment for a file of `nbytes`; replaces what is left of an earlier try.

    Args:
        path: of the segment.
        nbytes: of the shard file.
        spare: a sealed segment that nobody will write or read any more; it becomes this one.

    Raises:
        VaultError: there is no room.
    """
    try:
        delete(path)
        fd = _new(path) if spare is None else _taken_over(spare, path, nbytes)
        try:
            os.posix_fallocate(fd, 0, DATA_AT + nbytes)
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(fd)
    except OSError as error:
        raise VaultError(
            f"no room for {nbytes} bytes in shared memory: {error.strerror}; lower memory.budget_gb, or give "
            "the machine (or container) a larger /dev/shm",
            path=path,
        ) from error


def _new(path: str) -> int:
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)


def _taken_over(spare: str, path: str, nbytes: int) -> int:
    """First it is torn, then it is another one."""
    try:
        fd = os.open(spare, os.O_WRONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return _new(path)
    os.pwrite(fd, bytes(DATA_AT), 0)
    os.ftruncate(fd, DATA_AT + nbytes)
    os.rename(spare, path)
    return fd


def delete(path: str) -> None:
    """Removes a segment, if it is there."""
    with suppress(FileNotFoundError):
        os.unlink(path)


def fill(path: str, chunks: Iterable[Buffer]) -> None:
    """Writes the shard file.

    Raises:
        VaultError: the segment is gone.
    """
    fd = _open(path, os.O_WRONLY)
    try:
        at = DATA_AT
        for chunk in chunks:
            view = memoryview(chunk).cast("B")
            while view:
                count = os.pwrite(fd, view, at)
                view, at = view[count:], at + count
    finally:
        os.close(fd)


def put(path: str, begin: int, data: bytes) -> None:
    """Writes some bytes of the shard file.

    Raises:
        VaultError: the segment is gone.
    """
    fd = _open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, data, DATA_AT + begin)
    finally:
        os.close(fd)


def seal(path: str, held: Held) -> None:
    """Says that the bytes are whole.

    Raises:
        VaultError: the segment is gone.
    """
    text = json.dumps(held.meta(), separators=(",", ":")).encode("ascii")
    fd = _open(path, os.O_WRONLY)
    try:
        os.pwrite(fd, text, DATA_AT + held.nbytes)
        os.pwrite(fd, _HEADER.pack(_MARK, held.nbytes, len(text), xxh3_128_digest(text)), 0)
    finally:
        os.close(fd)


def offer(path: str, token: str) -> None:
    """Notes that the attempt of this token (32 hex digits) was told of the segment."""
    fd = _open(path, os.O_RDWR)
    try:
        begin = _offers_at(fd)
        whole = (os.fstat(fd).st_size - begin) // _OFFER_BYTES
        os.pwrite(fd, bytes.fromhex(token), begin + whole * _OFFER_BYTES)
    finally:
        os.close(fd)


def read_held(path: str) -> Held | None:
    """What a sealed segment says of itself; None for one that is torn, foreign, or gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        _, nbytes, meta_bytes, digest = _header(fd)
        text = os.pread(fd, meta_bytes, DATA_AT + nbytes)
        if xxh3_128_digest(text) != digest:
            return None
        begin = DATA_AT + nbytes + meta_bytes
        raw = os.pread(fd, max(0, os.fstat(fd).st_size - begin), begin)
        whole = len(raw) // _OFFER_BYTES
        offered = [raw[n * _OFFER_BYTES : (n + 1) * _OFFER_BYTES].hex() for n in range(whole)]
        held = Held.model_validate(json.loads(text) | {"offered": offered})
        return held if held.nbytes == nbytes else None
    except (OSError, ValueError, ValidationError):
        return None
    finally:
        os.close(fd)


def read_into(path: str, begin: int, *into: memoryview) -> int:
    """Fills memory from byte `begin` of the shard file on; returns the bytes there were, 0 if it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return 0
    try:
        return fill_views(os, fd, DATA_AT + begin, [view.cast("B") for view in into])
    finally:
        os.close(fd)


def chunks(path: str, begin: int, end: int) -> Iterator[memoryview]:
    """Bytes `begin` to `end` of the shard file, in pieces that are good until the next one is asked for.

    Raises:
        VaultError: they are not there.
    """
    buffer = memoryview(bytearray(min(_CHUNK_BYTES, end - begin)))
    for at in range(begin, end, _CHUNK_BYTES):
        piece = buffer[: min(_CHUNK_BYTES, end - at)]
        if read_into(path, at, piece) < len(piece):
            raise VaultError(f"segment {path} is gone or cut off at byte {at}", path=path)
        yield piece


def _open(path: str, flags: int) -> int:
    try:
        return os.open(path, flags | os.O_CLOEXEC)
    except OSError as error:
        raise VaultError(
            f"segment {path} is gone ({error.strerror}): its vault dropped it", path=path
        ) from error


def _header(fd: int) -> tuple[bytes, int, int, bytes]:
    """(mark, file bytes, meta bytes, digest of the meta).

    Raises:
        ValueError: not sealed, or no segment.
    """
    raw = os.pread(fd, _HEADER.size, 0)
    if len(raw) < _HEADER.size or raw[: len(_MARK)] != _MARK:
        raise ValueError("no sealed segment")
    mark, nbytes, meta_bytes, digest = _HEADER.unpack(raw)
    if meta_bytes > _MAX_META_BYTES or DATA_AT + nbytes + meta_bytes > os.fstat(fd).st_size:
        raise ValueError("a segment that ends too early")
    return mark, nbytes, meta_bytes, digest


def _offers_at(fd: int) -> int:
    _, nbytes, meta_bytes, _ = _header(fd)
    return DATA_AT + nbytes + meta_bytes
