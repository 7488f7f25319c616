"""The Slurm script, run by bash, with Slurm and Ray played by small programs on PATH."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "cluster" / "deploy" / "slurm" / "train.sbatch"
LIMIT_S = 60

STUBS = {
    # Notes its call; a step lives until it is told to end, like `ray start --block`.
    "srun": 'echo "srun $* address=${RAY_ADDRESS:-none}" >>"$CALLS"\nexec sleep 300',
    "scontrol": """case "$1" in
show) printf '%s\\n' $NODES ;;
*) echo "scontrol $*" >>"$CALLS" ;;
esac""",
    "hostname": 'echo "${STUB_IP:-10.0.0.1} fe80::1"',
    "python": """case "$2" in
import*) echo 5ec2e7 ;;
cluster.wait)
    echo "wait $* address=$RAY_ADDRESS token=${RAY_AUTH_TOKEN:+set}" >>"$CALLS"
    [ -z "${WAIT_CODE:-}" ] || exit "$WAIT_CODE"
    until [ "$(grep -c ^srun "$CALLS")" -ge "$4" ]; do sleep 0.02; done ;;
app)
    echo "app $*" >>"$CALLS"
    trap 'echo told >>"$CALLS"; exit 75' USR1
    echo ready >"$READY"
    [ "$APP" = code ] && exit "$APP_CODE"
    while :; do sleep 0.05; done ;;
esac""",
}


class Slurm:
    """One job of the script."""

    def __init__(self, tmp: Path) -> None:
        self.tmp, self.calls, self.ready = tmp, tmp / "calls", tmp / "ready"
        self.calls.touch()
        (tmp / "bin").mkdir()
        for name, body in STUBS.items():
            path = tmp / "bin" / name
            path.write_text(f"#!/usr/bin/env bash\n{body}\n")
            path.chmod(0o755)

    def start(self, *args: str, nodes: str = "n1 n2 n3", **env: str) -> "subprocess.Popen[str]":
        base = {
            "PATH": f"{self.tmp / 'bin'}{os.pathsep}{os.environ['PATH']}",
            "CALLS": str(self.calls),
            "READY": str(self.ready),
            "NODES": nodes,
            "SLURM_JOB_NODELIST": "n[1-3]",
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NAME": "nightly",
            "SLURM_CPUS_ON_NODE": "8",
            "STORAGE": "/shared/runs",
            "APP": "runs",
        }
        return subprocess.Popen(
            ["bash", str(SCRIPT), *args],
            env={**base, **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, *args: str, **env: str) -> tuple[int, str]:
        process = self.start(*args, **env)
        output, _ = process.communicate(timeout=LIMIT_S)
        return process.returncode, output

    def wait_ready(self, process: "subprocess.Popen[str]") -> None:
        deadline = time.monotonic() + LIMIT_S
        while not self.ready.exists():
            assert process.poll() is None, process.communicate()[0]
            assert time.monotonic() < deadline, "the run did not start in time"
            time.sleep(0.02)

    def lines(self, first: str) -> list[str]:
        return [line for line in self.calls.read_text().splitlines() if line.split()[0] == first]


@pytest.fixture
def slurm(tmp_path: Path) -> Slurm:
    return Slurm(tmp_path)


def steps_of(process: "subprocess.Popen[str]") -> list[str]:
    """Living processes of the session of the script."""
    found = []
    for other in psutil.process_iter(["name", "status"]):
        with suppress(ProcessLookupError):
            if os.getsid(other.pid) == process.pid and other.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(other.info["name"])
    return found


def test_the_script_is_valid_bash() -> None:
    subprocess.run(["bash", "-n", str(SCRIPT)], check=True)


def test_slurm_signals_the_script_in_time_and_may_requeue_it() -> None:
    options = {line.split()[1] for line in SCRIPT.read_text().splitlines() if line.startswith("#SBATCH")}
    assert {"--requeue", "--exclusive", "--no-kill", "--open-mode=append", "--ntasks-per-node=1"} <= options
    (lead,) = (option for option in options if option.startswith("--signal="))
    assert lead.startswith("--signal=B:USR1@")  # B: to the script, which knows the driver
    grace_s = SCRIPT.read_text().split("GRACE_S=${GRACE_S:-")[1].split("}")[0]
    assert int(lead.split("@")[1]) >= 2 * int(grace_s)


def test_a_head_and_a_step_for_each_other_node_then_the_run(slurm: Slurm) -> None:
    code, output = slurm.run("--set", "cluster.workers=3", APP="code", APP_CODE="0")
    assert code == 0, output
    head, *workers = sorted(slurm.lines("srun"), key=lambda line: line.partition("--nodelist=")[2])
    assert "--nodelist=n1 " in head
    assert "--head --node-ip-address=10.0.0.1 --port=24567 --dashboard-host=127.0.0.1" in head
    assert ["--nodelist=n2 " in workers[0], "--nodelist=n3 " in workers[1], len(workers)] == [True, True, 2]
    assert all("--address=10.0.0.1:24567" in line and "--head" not in line for line in workers)
    assert all("--block" in line and "--num-cpus=8" in line for line in (head, *workers))
    assert all(line.endswith("address=none") for line in (head, *workers))
    first, all_of_them = slurm.lines("wait")
    assert "--nodes 1 --limit-s 300 address=10.0.0.1:24567 token=set" in first
    assert "--nodes 3 " in all_of_them
    (run,) = slurm.lines("app")
    assert "--run-name nightly --storage /shared/runs" in run
    assert "preemption_signals=[SIGTERM,SIGUSR1]" in run
    assert run.endswith("--set cluster.workers=3")
    assert slurm.lines("scontrol") == []
    assert "5ec2e7" not in output  # the token


@pytest.mark.parametrize("sig", [signal.SIGUSR1, signal.SIGTERM])
def test_the_announced_end_reaches_the_run_and_the_job_is_requeued(slurm: Slurm, sig: signal.Signals) -> None:
    process = slurm.start()
    slurm.wait_ready(process)
    process.send_signal(sig)
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 75, output
    assert slurm.lines("told") == ["told"]
    assert slurm.lines("scontrol") == ["scontrol requeue 1234567"]
    assert steps_of(process) == []


def test_the_code_of_a_failed_run_is_the_jobs_and_nothing_is_requeued(slurm: Slurm) -> None:
    process = slurm.start(APP="code", APP_CODE="7")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 7, output
    assert slurm.lines("scontrol") == []
    assert steps_of(process) == []


def test_nodes_that_do_not_come_end_the_job_and_what_it_started(slurm: Slurm) -> None:
    process = slurm.start(WAIT_CODE="1")
    output, _ = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, output
    assert slurm.lines("app") == []
    assert steps_of(process) == []


def test_a_head_that_knows_itself_as_loopback_is_refused(slurm: Slurm) -> None:
    code, output = slurm.run(STUB_IP="127.0.1.1")
    assert code == 2
    assert "set HEAD_IP" in output
    assert slurm.lines("srun") == []


def test_one_node_needs_no_other(slurm: Slurm) -> None:
    code, output = slurm.run(nodes="n1", APP="code", APP_CODE="0", STUB_IP="127.0.1.1")
    assert code == 0, output
    assert len(slurm.lines("srun")) == 1


def test_without_a_storage_the_error_says_what_to_give(slurm: Slurm) -> None:
    code, output = slurm.run(STORAGE="")
    assert code != 0
    assert "sbatch --export=ALL,STORAGE=" in output
