"""Memory of a host that two processes share and that no crash can leave behind.

A box is an anonymous file in memory (`memfd`): it has no name in /dev/shm, so there is nothing to sweep after
a SIGKILL, and the small /dev/shm of a container does not limit it. The store process holds it open; a
trainer of the same host opens it as `/proc/<pid>/fd/<number>`. The kernel frees it with the last of them.
"""

import mmap
import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from layercheck.errors import ConfigError, LayerCheckError

_NAME = "layercheck-gemini"
_MARGIN = 1.05
_CGROUPS = (
    ("memory.max", "memory.current"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
)


class HostMemoryError(LayerCheckError):
    """The store process of this host is gone, and its memory with it."""


@dataclass(frozen=True, slots=True)
class Region:
    """Where a process of the same host finds a box."""

    pid: int
    number: int
    nbytes: int


def create(nbytes: int) -> int:
    """A new box of zeros, its pages reserved.

    Returns:
        The file descriptor that keeps it alive.
    """
    number = os.memfd_create(_NAME, os.MFD_CLOEXEC)
    try:
        os.posix_fallocate(number, 0, nbytes)
    except BaseException:
        os.close(number)
        raise
    return number


def attach(region: Region) -> mmap.mmap:
    """Maps a box of another process of this host.

    Raises:
        HostMemoryError: that process is gone.
    """
    try:
        number = os.open(f"/proc/{region.pid}/fd/{region.number}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise HostMemoryError(
            f"the store process {region.pid} of this host does not give its memory away ({error}): it ended, "
            "or it runs as another user or in another container than the trainer",
            pid=region.pid,
        ) from error
    try:
        return mmap.mmap(number, region.nbytes)
    finally:
        os.close(number)


def is_held(region: Region) -> bool:
    """True while the store process keeps this box; its memory may outlive it in those who mapped it."""
    try:
        return os.readlink(f"/proc/{region.pid}/fd/{region.number}").startswith(f"/memfd:{_NAME}")
    except OSError:
        return False


def free_bytes(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Bytes that this host, or the container, can still hand out."""
    room = psutil.virtual_memory().available
    for limit_name, usage_name in _CGROUPS:
        with suppress(OSError, ValueError):  # no such file, or `max`
            limit, usage = ((cgroup / name).read_text() for name in (limit_name, usage_name))
            room = min(room, int(limit) - int(usage))
    return room


def check_room(need: int, free: int, host: str) -> None:
    """Refuses what would have the kernel end processes later.

    Raises:
        ConfigError: `need` bytes, with a twentieth to spare, are not free.
    """
    if need * _MARGIN > free:
        raise ConfigError(
            f"checkpoint.method=gemini needs {need / 1e9:.2f} GB of memory on host {host} (24 bytes a "
            f"parameter for the two slots of each copy it keeps), {free / 1e9:.2f} GB are free: use hosts "
            "with more memory, more workers, or another checkpoint.method",
            need=need,
            free=free,
        )
