"""The calls of a POSIX file system that the local storage makes. The module `os` has them all."""

import errno
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

Buffer = bytes | bytearray | memoryview
ABSENT = (errno.ENOENT, errno.ELOOP, errno.ENOTDIR)
"""Errors that mean that a path names nothing."""

_MOST_BUFFERS = 1024  # of one `preadv`, by Linux (IOV_MAX)


class FileCalls(Protocol):
    """A few functions of `os`, with its arguments, results and errors.

    A test brings its own to end the process at each of them, or to cut the power: what a crash leaves depends
    on these calls and their order alone.
    """

    def open(self, path: str, flags: int, mode: int = ..., /) -> int: ...  # noqa: D102
    def write(self, fd: int, data: memoryview, /) -> int: ...  # noqa: D102
    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int, /) -> int: ...  # noqa: D102
    def fsync(self, fd: int, /) -> None: ...  # noqa: D102
    def close(self, fd: int, /) -> None: ...  # noqa: D102
    def rename(self, source: str, target: str, /) -> None: ...  # noqa: D102
    def link(self, source: str, target: str, /) -> None: ...  # noqa: D102
    def unlink(self, path: str, /) -> None: ...  # noqa: D102
    def mkdir(self, path: str, mode: int, /) -> None: ...  # noqa: D102
    def rmdir(self, path: str, /) -> None: ...  # noqa: D102
    def listdir(self, path: str, /) -> list[str]: ...  # noqa: D102
    def stat(self, path: str | int, /) -> os.stat_result: ...  # noqa: D102
    def lstat(self, path: str, /) -> os.stat_result: ...  # noqa: D102


@contextmanager
def absent_is_fine() -> Iterator[None]:
    """Leaves the block quietly if a path in it names nothing."""
    try:
        yield
    except OSError as error:
        if error.errno not in ABSENT:
            raise


def fill(calls: FileCalls, fd: int, begin: int, views: list[memoryview]) -> int:
    """Reads from `begin` on into the views, one after another.

    Args:
        calls: the file system.
        fd: open for reading.
        begin: offset in the file.
        views: of bytes; used up.

    Returns:
        The bytes read: fewer than there is room for where the file ends.
    """
    done = at = 0
    while at < len(views):
        if not views[at]:
            at += 1
            continue
        count = calls.preadv(fd, views[at : at + _MOST_BUFFERS], begin + done)
        if count == 0:
            break
        done += count
        while at < len(views) and count >= len(views[at]):
            count -= len(views[at])
            at += 1
        if count:
            views[at] = views[at][count:]
    return done
