"""What a node does that will be taken away: `python -m cluster.leave --deadline-s 120`, a pod's preStop hook.

Where workers of a run live, Ray is told to drain the node: they go on until their last save is due, then the
group starts again elsewhere. Where the driver of a run lives, it gets SIGTERM: all ranks save, the run ends
with code 75, and whoever retries jobs continues it. The command returns when all of them are gone, or at the
deadline; at once where there are none, so that the end of a job is not held up.

It speaks for all runs that it sees: for pods, and machines that one cluster has to itself.
"""

# ruff: noqa: T201
import argparse
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

import psutil

_PAUSE_S = 0.5
_WORKER = "ray::RayTrainWorker"
_DRAIN_LIMIT_S = 30.0
CommandLines = Iterable[tuple[int, Sequence[str]]]


@dataclass(frozen=True, slots=True)
class Tenants:
    """Processes of runs on this node, by process id."""

    workers: tuple[int, ...]
    drivers: tuple[int, ...]

    def __bool__(self) -> bool:
        return bool(self.workers or self.drivers)


def tenants(command_lines: CommandLines) -> Tenants:
    """Workers and drivers among the processes, given as (process id, arguments).

    The shell that Ray starts a driver with names the program too, but within one argument.
    """
    workers, drivers = [], []
    for pid, words in command_lines:
        if words and words[0].startswith(_WORKER):
            workers.append(pid)
        elif any(pair == ("-m", "app") for pair in pairwise(words)):
            drivers.append(pid)
    return Tenants(tuple(workers), tuple(drivers))


def leave(
    deadline_s: float,
    look: Callable[[], Tenants],
    drain: Callable[[float], None],
    end: Callable[[int], None],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> bool:
    """Announces the end of the node and waits.

    Args:
        deadline_s: seconds until the node is gone.
        look: the runs' processes on it.
        drain: tells Ray, with the seconds that remain.
        end: sends a driver its signal.
        clock: seconds.
        sleep: waits some seconds.

    Returns:
        True if all processes of runs had ended by the deadline.
    """
    deadline, found = clock() + deadline_s, look()
    for pid in found.drivers:
        end(pid)
    if found.workers and not found.drivers:  # a driver that ends takes its workers with it
        drain(deadline_s)
    while look():
        if clock() >= deadline:
            return False
        sleep(_PAUSE_S)
    return True


def _look() -> Tenants:
    lines = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            lines.append((process.pid, process.cmdline()))
    return tenants(lines)


def _drain(remaining_s: float) -> None:
    command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node"]
    command += ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "the node is taken away"]
    command += ["--deadline-remaining-seconds", str(int(remaining_s))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_DRAIN_LIMIT_S, check=False)
    if done.returncode:
        print(f"Ray refused to drain this node: {done.stderr.strip()[-500:]}", file=sys.stderr)


def _end(pid: int) -> None:
    with suppress(psutil.Error):
        psutil.Process(pid).send_signal(signal.SIGTERM)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 nothing is left, 1 something still ran at the deadline."""
    parser = argparse.ArgumentParser(prog="python -m cluster.leave", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--deadline-s", type=float, required=True, help="seconds until the node is gone")
    args = parser.parse_args(arguments)
    return 0 if leave(args.deadline_s, _look, _drain, _end) else 1


if __name__ == "__main__":
    sys.exit(main())
