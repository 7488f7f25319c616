"""Private heads and jobs on them, each used from processes of their own, as a person would."""

import os
import signal
import stat
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from cluster.follow import LOST_CONTACT
from cluster.head import HeadError, PrivateHead, _members, start_head

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ray

PROGRAM = """
import os, signal, sys, time
if "--save-to" in sys.argv:
    def save(*_):
        time.sleep(4)  # longer than Ray waits by itself
        open(sys.argv[sys.argv.index("--save-to") + 1], "w").write("saved")
        sys.exit(75)
    signal.signal(signal.SIGTERM, save)
    print("training", flush=True)
    time.sleep(300)
print("arguments", sys.argv[1:], flush=True)
print("runs", sys.executable, flush=True)
print("sees", os.environ["RAY_ADDRESS"], flush=True)
sys.exit(int(sys.argv[sys.argv.index("--code") + 1]))
"""


@pytest.fixture(scope="module")
def head() -> Iterator[PrivateHead]:
    with start_head(num_cpus=3) as started:
        yield started


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A working folder whose `app` ends with the code it is told."""
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__init__.py").touch()  # else any other `app` of the path goes before it
    (tmp_path / "app" / "__main__.py").write_text(PROGRAM)
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "huge").write_bytes(b"x" * 1000)
    return tmp_path


def submit(head: PrivateHead, project: Path, *args: str, env: dict[str, str] | None = None):
    return subprocess.run(
        [sys.executable, "-m", "cluster.submit", "train", *args],
        cwd=project,
        env={**os.environ, "PYTHONPATH": str(ROOT), **head.env, **(env or {})},
        capture_output=True,
        text=True,
        timeout=120,
        stdin=subprocess.DEVNULL,
    )


def test_a_job_that_succeeds_gives_code_0_and_its_log(head, project):
    done = submit(head, project, "--code", "0")
    assert done.returncode == 0, done.stderr
    assert f"'--storage', '{project}/runs'" in done.stdout
    assert done.stdout.count("arguments") == 1
    assert f"runs {sys.executable}\n" in done.stdout


def test_a_job_that_fails_gives_its_own_code_and_says_how_to_continue(head, project):
    done = submit(head, project, "--code", "7", "--run-name", "x")
    assert done.returncode == 7, done.stderr
    assert (
        "to continue this run from its newest saves: python -m cluster.submit train --code 7" in done.stdout
    )


def test_a_wrong_token_is_refused_with_one_error(head, project, tmp_path):
    (tmp_path / "other-token").write_text("0" * 64)
    done = submit(head, project, "--code", "0", env={"RAY_AUTH_TOKEN_PATH": str(tmp_path / "other-token")})
    assert done.returncode == 2
    assert "cannot submit to" in done.stderr
    assert "Traceback" not in done.stderr


def test_without_a_token_the_dashboard_refuses(head):
    with pytest.raises(urllib.error.HTTPError) as caught:
        urllib.request.urlopen(f"{head.dashboard}/api/jobs/", timeout=10)
    assert caught.value.code in (401, 403)


def test_the_token_can_be_read_by_its_owner_alone(head):
    assert stat.S_IMODE((head.folder / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(head.folder.stat().st_mode) == 0o700


def test_dashboard_and_job_server_listen_on_loopback_alone(head):
    port = int(head.dashboard.rpartition(":")[2])
    listening = [sock.laddr for sock in psutil.net_connections("tcp") if sock.status == psutil.CONN_LISTEN]
    assert {where.ip for where in listening if where.port == port} == {"127.0.0.1"}


def test_the_token_stands_in_no_other_file_of_the_head_and_on_no_command_line(head, project):
    assert submit(head, project, "--code", "0").returncode == 0
    token = (head.folder / "token").read_bytes()
    files = [path for path in head.folder.rglob("*") if path.is_file() and not path.is_symlink()]
    assert len(files) > 20, "logs and session files of Ray are among them"
    assert [path.name for path in files if token in path.read_bytes()] == ["token"]
    lines = {pid: Path(f"/proc/{pid}/cmdline").read_bytes() for pid in head.members()}
    assert lines
    assert [line for line in lines.values() if token in line] == []


@pytest.mark.slow
def test_a_second_head_comes_and_goes_and_the_first_does_not_notice(head, project):
    before = set(_members(head))
    with start_head(num_cpus=1) as second:
        assert second.address != head.address
        members = _members(second)
        assert members
        assert not before & set(members)
    assert not any(Path("/proc", str(pid)).exists() and _is_living(pid) for pid in members)
    assert not second.folder.exists()
    assert before <= set(_members(head))
    assert submit(head, project, "--code", "0").returncode == 0


def test_a_head_that_cannot_start_says_why_and_leaves_nothing(monkeypatch):
    made = []
    make = tempfile.mkdtemp
    monkeypatch.setattr(tempfile, "mkdtemp", lambda **how: made.append(make(**how)) or made[-1])
    with pytest.raises(HeadError, match="not ready within 0 s"):
        start_head(num_cpus=1, ready_s=0)
    assert len(made) == 1
    assert not Path(made[0]).exists()


def test_submitting_to_nobody_is_one_clear_error(project, head):
    done = submit(head, project, "--address", "http://127.0.0.1:9", "--code", "0")
    assert done.returncode == 2
    assert "cannot submit to http://127.0.0.1:9" in done.stderr


@pytest.mark.slow
def test_ctrl_c_leaves_a_job_alone_and_stop_lets_it_save_first(head, project, tmp_path):
    saved = tmp_path / "saved"
    command = [sys.executable, "-m", "cluster.submit", "train"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), **head.env}
    with subprocess.Popen(
        [*command, "--save-to", str(saved)],
        cwd=project,
        env=env,
        stdout=subprocess.PIPE,
        text=True,
        # A shell starts its background jobs with Ctrl-C ignored, and so would these tests start the command.
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    ) as first:
        assert first.stdout is not None
        begun = [next(first.stdout)]
        while "training" not in begun[-1]:
            begun.append(next(first.stdout))
        first.send_signal(signal.SIGINT)
        left = first.stdout.read()
    assert first.returncode == LOST_CONTACT
    job = begun[0].split()[1]
    assert f"job {job} goes on; to follow it: python -m cluster.submit train --attach {job}" in left
    assert f"to end it: python -m cluster.submit train --stop {job}" in left
    assert not saved.exists()
    done = submit(head, project, "--stop", job)
    assert done.returncode == 0, done.stderr
    assert saved.read_text() == "saved"
    assert f"job {job} stopped" in done.stdout
    again = submit(head, project, "--attach", job)
    assert again.returncode == 1
    assert "training" in again.stdout


def test_a_job_that_nobody_submitted_is_one_clear_error(head, project):
    done = submit(head, project, "--stop", "raysubmit_nosuch")
    assert done.returncode == 2
    assert "no job raysubmit_nosuch at " in done.stderr


def _is_living(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
