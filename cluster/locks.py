"""Extension builds that a SIGKILL cannot block.

DeepSpeed compiles one small op with torch's extension loader. At *every* process start the loader creates
`<TORCH_EXTENSIONS_DIR>/<op>/lock`, checks the build and removes the file; whoever finds the file waits for it
without limit. A worker killed in between leaves the file, and the next attempt hangs before its first step.

The loader keeps the file open while it owns it, so the kernel knows the truth: a lock that no process of this
machine has open has a dead maker. For that to hold the folder must be private to one machine and one user.
"""

import fcntl
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from importlib.metadata import version
from pathlib import Path

from layercheck.errors import LayerCheckError

_BUILD = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
_SETTLE_S = 1.0


class ExtensionBuildError(LayerCheckError):
    """The compiler failed or did not end within the limit."""


def prepare_extensions(run_dir: str | Path, limit_s: float = 300) -> dict[str, str]:
    """Gives this run a built copy of DeepSpeed's op; call it before `deepspeed` is imported.

    The first call on a machine compiles (20 to 47 s); every later run copies. States, per machine:
    1. one process holds the guard (a kernel lock, gone with its holder), all others wait for it;
    2. the holder clears stale locks and builds into `built-<versions>`;
    3. the build is copied to `<hash of both>` under a temporary name and renamed: complete or absent.

    Args:
        run_dir: folder or URI of the run; only its name matters.
        limit_s: seconds for the wait and for the compiler, each.

    Returns:
        Environment variables for the workers of this run.
    """
    root = extensions_root()
    built = root / f"built-{_build_key()}"
    # Of the environment too: two of them in one folder would compile over each other's work.
    mine = root / blake2b(f"{_build_key()}:{run_dir}".encode(), digest_size=8).hexdigest()
    with _guard(root, limit_s) as guard:
        if not (built / "complete").exists():
            clear_stale_locks(built)
            _compile(built, guard, limit_s)
            (built / "complete").touch()
        if not (mine / "complete").exists():
            _copy(built, mine)
    clear_stale_locks(mine)
    return {"TORCH_EXTENSIONS_DIR": str(mine), "PATH": _path_with_ninja()}


def extensions_root() -> Path:
    """The folder of all builds of this machine and user, writable by nobody else."""
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    # The machine's name keeps apart nodes that share a home folder: /proc of one says nothing of the other.
    root = Path(home) / "layercheck" / "extensions" / platform.node()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError:
        root = Path(tempfile.gettempdir()) / f"layercheck-{os.getuid()}"
        root.mkdir(mode=0o700, exist_ok=True)
        if root.lstat().st_uid != os.getuid():
            # A library that another user can plant would be loaded into every worker.
            raise ExtensionBuildError(
                f"{root} belongs to another user; set HOME to a writable folder"
            ) from None
    return root


def clear_stale_locks(folder: str | Path, limit_s: float = 60) -> tuple[Path, ...]:
    """Removes the loader locks below `folder` whose maker is dead; returns them.

    Locks with a living maker stay: the loader waits for these rightly. Call it at the start of each worker.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return ()
    with _guard(folder, limit_s):
        return tuple(lock for lock in sorted(folder.glob("*/lock")) if _clear(lock))


def _clear(lock: Path) -> bool:
    # Under the guard nobody else removes a lock without owning it, and nobody can replace an existing one
    # (it is created exclusively), so the file that was judged is the file that is removed.
    while True:
        try:
            age_s = time.time() - lock.stat().st_ctime
            if _has_holder(lock):
                return False
        except FileNotFoundError:
            return False
        # A maker that lives creates the file an instant before its descriptor shows in /proc.
        if age_s >= _SETTLE_S:
            lock.unlink(missing_ok=True)
            return True
        time.sleep(max(_SETTLE_S - age_s, 0.05))


def _has_holder(lock: Path) -> bool:
    wanted = lock.stat()
    for fd in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            found = fd.stat()
        except OSError:
            continue  # the process or the descriptor is gone, or belongs to another user
        if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
            return True
    return False


@contextmanager
def _guard(folder: Path, limit_s: float) -> Iterator[int]:
    """Holds `<folder>/.guard`; yields its descriptor. The kernel frees it when the holder dies."""
    folder.mkdir(parents=True, exist_ok=True)
    fd = os.open(folder / ".guard", os.O_CREAT | os.O_RDWR, 0o600)
    try:
        _lock_within(fd, folder, limit_s)
        yield fd
    finally:
        os.close(fd)


def _lock_within(fd: int, folder: Path, limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > deadline:
                raise ExtensionBuildError(
                    f"another process has held {folder} for {limit_s:g} s; end it or remove the folder",
                    folder=str(folder),
                ) from None
            time.sleep(0.1)


def _compile(built: Path, guard: int, limit_s: float) -> None:
    env = {**os.environ, "TORCH_EXTENSIONS_DIR": str(built), "PATH": _path_with_ninja()}
    # The compiler inherits the guard: should this process be killed, the orphan keeps it until it ends, and
    # no second compiler writes into the same folder.
    child = subprocess.Popen(
        [sys.executable, "-c", _BUILD],
        env=env,
        pass_fds=(guard,),
        start_new_session=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        output, _ = child.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise ExtensionBuildError(f"the extension build did not end within {limit_s:g} s") from None
    if child.returncode:
        raise ExtensionBuildError(
            f"the extension build failed; is a C++ compiler installed?\n{output[-2000:]}"
        )


def _copy(built: Path, mine: Path) -> None:
    temporary = mine.with_name(mine.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    # copy2 keeps the modification times that ninja compares: the copy counts as up to date.
    shutil.copytree(built, temporary, ignore=shutil.ignore_patterns("lock", ".guard"))
    shutil.rmtree(mine, ignore_errors=True)
    temporary.rename(mine)


def _build_key() -> str:
    # The build file names headers by full path: another environment would compile again in every run folder.
    prefix = blake2b(sys.prefix.encode(), digest_size=4).hexdigest()
    return "-".join([prefix] + [f"{name}{version(name)}" for name in ("torch", "deepspeed")])


def _path_with_ninja() -> str:
    # A worker started by the interpreter's full path has no activated environment; the loader needs ninja.
    scripts = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    return path if scripts in path.split(os.pathsep) else scripts + os.pathsep + path
