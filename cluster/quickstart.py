"""The demonstration of `quickstart.sh`: a run without failure, one with a worker killed, the proof, ETTR.

The receipt is shown as soon as it is there; the simulation, half a minute, comes last.
"""

# ruff: noqa: T201
import argparse
import os
import re
import shutil
import signal
import sys
import time
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TextIO

from cluster.head import PrivateHead, start_head
from cluster.locks import prepare_extensions
from cluster.summary import (
    failed_checks,
    loss_before,
    read_losses,
    read_receipts,
    read_summary,
    show_comparison,
    show_receipt,
)
from layercheck.errors import LayerCheckError

KILL_STEP = 60
RUNS = Path("runs")
_JOB_LIMIT_S = 600.0
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")
_PROGRESS = re.compile(
    r"(?:\(RayTrainWorker pid=\d+\) )?"
    r"((?:step \d|data: |run |warm-up |fault: |recovered |recovery |error: ).*)"
)


def main() -> int:
    """Returns 0 if the recovery was as it should be."""
    parser = argparse.ArgumentParser(prog="bash cluster/quickstart.sh", description=__doc__)
    parser.add_argument("--kill-step", type=int, default=KILL_STEP, help="step at which rank 1 is killed")
    options = parser.parse_args()
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, _leave)
    begin_s = time.monotonic()
    try:
        _prepare()
        code = _demonstrate(options.kill_step)
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{time.monotonic() - begin_s:.0f} s in all, after the installation")
    return code


def _prepare() -> None:
    for name in ("quickstart", "quickstart-nofailure"):
        if (RUNS / name).exists():
            print(f"removing the files of the last demonstration: {RUNS / name}")
            shutil.rmtree(RUNS / name)
    RUNS.mkdir(exist_ok=True)
    print("compiling DeepSpeed's small op (up to a minute; once for each .venv and torch)", flush=True)
    prepare_extensions(RUNS.absolute() / "quickstart")


def _demonstrate(kill_step: int) -> int:
    """All that needs the head; the exit code."""
    # The head offers more CPUs than a small machine has: two workers and their helpers must fit.
    with start_head(num_cpus=max(4, os.cpu_count() or 1)) as head:
        print(
            f"private Ray head at {head.address}, dashboard at {head.dashboard} (process {head.process.pid})"
        )
        _train(head, "quickstart-nofailure", [])
        kill = f"faults.kill=[{{rank: 1, step: {kill_step}, times: 1}}]"
        print(f"\nthe same run again; rank 1 will be killed (SIGKILL) at step {kill_step}", flush=True)
        _train(head, "quickstart", ["--set", kill])
        if code := _show(kill_step):
            return code
        print("\nwhat these costs mean on a cluster: effective training time ratio by simulation", flush=True)
        _simulate(head)
    return 0


def _simulate(head: PrivateHead) -> None:
    """A second Ray job, on the costs of the run that was killed and recovered."""
    run = str(RUNS / "quickstart")
    args = ["--costs", run, "--out", f"{run}/ettr", "--mtbf-h", "0.05", "3", "--points", "5"]
    _submit(
        head, "ettr", [*args, "--seeds", "10", "--days", "3"], RUNS / "quickstart-ettr.log", every_line=True
    )


def _train(head: PrivateHead, run: str, more: list[str]) -> None:
    args = ["--config", "quickstart", "--run-name", run, "--storage", str(RUNS.absolute()), *more]
    _submit(head, "train", args, RUNS / f"{run}.log")


def _submit(head: PrivateHead, kind: str, args: list[str], log: Path, every_line: bool = False) -> None:
    os.environ.update(head.env)
    # Ray reads its token settings once, when it is imported: not before the head's are set.
    from cluster.submit import submit

    lines: list[str] = []
    with open(log, "w") as file:
        job = submit(head.dashboard, kind, args)
        job.show = partial(_show_line, file, lines, every_line)
        code = job.follow(limit_s=_JOB_LIMIT_S)
    if code:
        print("\n".join(lines[-40:]), file=sys.stderr)
        raise LayerCheckError(
            f"the job of {log.stem} ended with exit code {code}; its log is {log}", log=str(log)
        )


def _show_line(file: TextIO, lines: list[str], every_line: bool, line: str) -> None:
    """Keeps everything; of a training prints its own lines: Ray tells of a dead worker in hundreds."""
    plain = _COLOUR.sub("", line)
    file.write(plain + "\n")
    file.flush()
    lines.append(plain)
    if every_line:
        print(f"  {plain}", flush=True)
        return
    if match := _PROGRESS.fullmatch(plain):
        print(f"  {match[1]}", flush=True)
    elif plain.startswith("(raylet) A worker died"):
        print("  a worker died; Ray starts the group again", flush=True)


def _show(kill_step: int) -> int:
    run, undisturbed = RUNS / "quickstart", RUNS / "quickstart-nofailure"
    killed, without = read_summary(run), read_summary(undisturbed)
    receipts = read_receipts(run)
    print()
    for receipt in receipts:
        print(show_receipt(receipt, loss_before(run, receipt.attempt), read_losses(undisturbed)))
    if receipts:
        print("\nthe two runs")
        print(show_comparison(killed, without, full_bytes=receipts[0].nbytes))
    wrong = failed_checks(killed, kill_step)
    for text in wrong:
        print(f"NOT as it should be: {text}", file=sys.stderr)
    if not wrong:
        print(f"all checks passed; see {run / 'summary.json'}", flush=True)
    return 1 if wrong else 0


def _leave(signum: int, frame: FrameType | None) -> None:
    """Lets the `with` blocks end the head on a signal that would otherwise just end this process."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
