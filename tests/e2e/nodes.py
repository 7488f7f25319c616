"""Further nodes of a private head, to be lost."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from cluster import head as heads
from cluster.head import PrivateHead

_FLAGS = (
    "--node-manager-port", "--object-manager-port", "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port", "--metrics-export-port", "--runtime-env-agent-port",
)  # fmt: skip


@contextmanager
def node(head: PrivateHead, num_cpus: int, ready_s: float = 60) -> Iterator[subprocess.Popen[bytes]]:
    """A node in its own process group; its processes carry the head's mark and end with it at the latest."""
    low = heads._free_range(heads._NUM_WORKER_PORTS)
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--address", head.address]
    command += ["--node-ip-address", "127.0.0.1", "--num-cpus", str(num_cpus), "--disable-usage-stats"]
    command += ["--min-worker-port", str(low), "--max-worker-port", str(low + heads._NUM_WORKER_PORTS - 1)]
    for flag, port in zip(_FLAGS, heads._free_ports(len(_FLAGS)), strict=True):
        command += [flag, str(port)]
    log = head.folder / f"node-{low}.log"
    with log.open("wb") as target:
        process = subprocess.Popen(
            command,
            env={**heads._clean_env(), **head.env, heads._MARK: str(head.folder)},
            stdin=subprocess.DEVNULL,
            stdout=target,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline = time.monotonic() + ready_s
        while b"Ray runtime started" not in log.read_bytes():
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < deadline, f"no node within {ready_s:g} s: {log.read_text()[-2000:]}"
            time.sleep(0.2)
        yield process
    finally:
        lose(process)


def lose(process: subprocess.Popen[bytes]) -> None:
    """The node is gone from one moment to the next, with all that runs on it."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(30)
