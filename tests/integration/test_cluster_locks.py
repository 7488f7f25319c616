"""A worker killed while it loads an extension does not hang the next start."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from cluster import locks
from cluster.locks import ExtensionBuildError, clear_stale_locks, prepare_extensions

HOLDER = """
import sys, time
from torch.utils.file_baton import FileBaton
assert FileBaton(sys.argv[1]).try_acquire()
print("held", flush=True)
time.sleep(60)
"""


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    (tmp_path / "op").mkdir()
    return tmp_path / "op" / "lock"


@pytest.fixture
def holder(lock: Path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(lock)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)


def test_the_lock_of_a_killed_loader_is_removed(tmp_path, lock, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait(10)
    assert lock.exists(), "the loader leaves its lock behind: the reason for all this"
    assert clear_stale_locks(tmp_path) == (lock,)
    assert not lock.exists()


def test_the_lock_of_a_living_loader_stays(tmp_path, lock, holder):
    os.utime(lock, (0, 0))
    assert clear_stale_locks(tmp_path) == ()
    assert lock.exists()


def test_a_lock_that_was_just_made_is_judged_only_after_a_while(tmp_path, lock, monkeypatch):
    # Between its creation and the sight of its descriptor a living maker looks dead.
    monkeypatch.setattr(locks, "_SETTLE_S", 0.5)
    lock.touch()
    looks = iter([False, True])
    monkeypatch.setattr(locks, "_has_holder", lambda _: next(looks))
    assert clear_stale_locks(tmp_path) == ()
    assert lock.exists()


def test_workers_that_start_together_clear_once(tmp_path, lock):
    lock.touch()
    cleared = []
    threads = [threading.Thread(target=lambda: cleared.extend(clear_stale_locks(tmp_path))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert cleared == [lock]


def test_a_folder_that_is_not_there_has_no_locks(tmp_path):
    assert clear_stale_locks(tmp_path / "none") == ()


@pytest.fixture
def fake_build(tmp_path: Path, monkeypatch) -> Path:
    """Replaces the compiler by a script that counts its runs; the real one takes half a minute."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    script = (
        "import os, pathlib; op = pathlib.Path(os.environ['TORCH_EXTENSIONS_DIR'], 'op'); "
        "op.mkdir(parents=True); "
        f"(op / 'op.so').touch(); open({str(tmp_path / 'count')!r}, 'a').write('x')"
    )
    monkeypatch.setattr(locks, "_BUILD", script)
    return tmp_path


def test_the_op_is_built_once_and_each_run_gets_its_own_copy(fake_build):
    first, again, second = (prepare_extensions(run)["TORCH_EXTENSIONS_DIR"] for run in ("a", "a", "b"))
    assert first == again != second
    assert Path(first, "op", "op.so").exists()
    assert Path(second, "op", "op.so").exists()
    assert (fake_build / "count").read_text() == "x"


def test_a_build_that_was_killed_does_not_hang_the_next_start(fake_build, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(
            locks,
            "_BUILD",
            "import os, pathlib, signal; op = pathlib.Path(os.environ['TORCH_EXTENSIONS_DIR'], 'dead'); "
            "op.mkdir(parents=True); (op / 'lock').touch(); os.kill(os.getpid(), signal.SIGKILL)",
        )
        with pytest.raises(ExtensionBuildError, match="failed"):
            prepare_extensions("a")
    folder = Path(prepare_extensions("a")["TORCH_EXTENSIONS_DIR"])
    assert (folder / "op" / "op.so").exists()
    assert not list(folder.glob("*/lock"))


def test_a_build_without_end_is_ended_after_the_limit(fake_build, monkeypatch):
    monkeypatch.setattr(locks, "_BUILD", "import time; time.sleep(60)")
    with pytest.raises(ExtensionBuildError, match="within 1 s"):
        prepare_extensions("a", limit_s=1)


def test_a_stale_lock_of_an_earlier_attempt_is_gone_when_the_worker_starts(fake_build):
    folder = Path(prepare_extensions("a")["TORCH_EXTENSIONS_DIR"])
    (folder / "op" / "lock").touch()
    prepare_extensions("a")
    assert not (folder / "op" / "lock").exists()


@pytest.mark.slow
def test_deepspeed_loads_its_op_from_a_prepared_folder_with_a_planted_lock(tmp_path):
    env = prepare_extensions(tmp_path / "run")
    (op,) = Path(env["TORCH_EXTENSIONS_DIR"]).glob("deepspeed_*")
    (op / "lock").touch()
    prepare_extensions(tmp_path / "run")
    load = "from deepspeed.comm.torch import build_shm_op; build_shm_op()"
    done = subprocess.run(
        [sys.executable, "-c", load], env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    assert "built successfully" in done.stdout
