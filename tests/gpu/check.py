"""What saving costs on one accelerator, and whether recovery is exact there.

    python -m tests.gpu.check [--json FILE] [--storage DIR] [--steps 60] [--device cuda|cpu] [--tiny]

Needs neither Ray nor a network: one rank, one process. The Python environment has to hold torch, deepspeed
(a pure wheel; with hjson), transformers, numpy, pyarrow, pydantic, psutil, py-cpuinfo and xxhash. The model
is a random one of the shape of Llama-3.2-1B, sequence 2048: 15 GB of fp32 state, about 60 GB of storage.
`--device cpu --tiny` goes the same way on a CPU in seconds.

Prints one JSON object:
    step_s_off, step_s_on   median seconds of a step without a session, and with one after its warm-up
    after_step_ms           median host time inside `after_step`, of steps with and without an event
    stall_ms_per_event      time that training waited for saves, per event after the warm-up
    syncs                   host synchronisations inside `after_step`: steps with any, and where in the code
    losses_equal            on is as off, bit for bit (I14)
    recovery                `exact`: after `save_now` a fresh engine of another seed goes on with the same
                            losses (I10)

Exit code 1 if the host ever waited in `after_step`, or anything is not exact.
"""

import argparse
import gc
import json
import os
import shutil
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

WARMUP = 5
LATER = 5
SEEDS = (1, 99)
SETTINGS = {
    "warmup_steps": WARMUP,
    "warmup_full_every": WARMUP,
    "target_interval": 10,
    "s_max": 40,
    "full_every": 0,
    "keep_versions": 1,
}


@dataclass
class Samples:
    """What the steps of one run showed; seconds."""

    losses: dict[int, float] = field(default_factory=dict)
    step_s: list[float] = field(default_factory=list)
    with_event_s: list[float] = field(default_factory=list)
    without_event_s: list[float] = field(default_factory=list)
    stall_s: float = 0.0
    events: int = 0
    layer_writes: int = 0
    steps_with_syncs: int = 0
    sync_places: Counter[str] = field(default_factory=Counter)


class StepClock:
    """Step times as the device saw them: the host is not made to wait until they are read."""

    def __init__(self, device: str) -> None:
        self._is_cuda = device == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        import torch

        if self._is_cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self._marks.append(event)
        else:
            self._marks.append(time.perf_counter())

    def intervals_s(self) -> list[float]:
        if not self._is_cuda:
            return [after - before for before, after in zip(self._marks, self._marks[1:], strict=False)]
        self._marks[-1].synchronize()
        pairs = zip(self._marks, self._marks[1:], strict=False)
        return [before.elapsed_time(after) / 1000 for before, after in pairs]


@contextmanager
def counted_syncs(device: str, samples: Samples) -> Iterator[None]:
    """Counts each operation of torch that makes the host wait for the device."""
    import torch

    if device != "cuda":
        yield
        return
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    samples.sync_places.update(places)
    samples.steps_with_syncs += bool(places)


def train_off(size: Any, device: str, steps: int) -> Samples:
    """The same engine with the same layer groups and no session."""
    from tests.gpu.model import build, train_step

    engine, samples, clock = build(size, SEEDS[0]), Samples(), StepClock(device)
    for step in range(1, steps + 1):
        samples.losses[step] = train_step(engine, size, step)
        clock.mark()
    samples.step_s = clock.intervals_s()[WARMUP:]
    engine.destroy()
    return samples


def train_on(size: Any, device: str, steps: int, storage: str) -> Samples:
    """With a session; a full event of step `steps` is waited for, and `LATER` steps follow it."""
    import layercheck
    from tests.gpu.model import build, train_step

    engine, samples, clock = build(size, SEEDS[0]), Samples(), StepClock(device)
    session = layercheck.attach(engine, storage, "check", SETTINGS, submission="check")
    session.resume()
    for step in range(1, steps + LATER + 1):
        samples.losses[step] = loss = train_step(engine, size, step)
        began = time.perf_counter()
        with counted_syncs(device, samples):
            report = session.after_step(step, {"loss": loss})
        after_s = time.perf_counter() - began
        if step <= steps:
            clock.mark()
        if WARMUP + 2 < step <= steps:  # the stall of the base is told two steps later
            (samples.with_event_s if report.layers_written else samples.without_event_s).append(after_s)
            samples.stall_s += report.stall_s
            samples.events += report.layers_written > 0
            samples.layer_writes += report.layers_written
        if step == steps:
            session.save_now()
    samples.step_s = clock.intervals_s()[WARMUP:]
    session.close("failed", "the check recovers from here")
    engine.destroy()
    return samples


def recover(size: Any, steps: int, storage: str) -> dict[str, Any]:
    """A fresh engine of another seed, from the full event of step `steps`."""
    import layercheck
    from tests.gpu.model import build, train_step

    _keep_only_the_full_event(storage, steps)
    engine = build(size, SEEDS[1])
    session = layercheck.attach(engine, storage, "check", SETTINGS, submission="check")
    began = time.perf_counter()
    point = session.resume()
    resume_s = time.perf_counter() - began
    losses = {}
    for step in range(point.step, steps + LATER + 1):
        losses[step] = train_step(engine, size, step)
        session.after_step(step, {"loss": losses[step]})
    session.close()
    engine.destroy()
    return {"first": point.step, "losses": losses, "resume_s": resume_s, "max_age": point.receipt.max_age}


def _keep_only_the_full_event(storage: str, steps: int) -> None:
    """As if the run had ended right after `save_now`: nothing after it was ever saved or journaled."""
    folder = Path(storage, "check/layercheck")
    for event in folder.glob("events/step-*"):
        if int(event.name[5:13]) > steps:
            shutil.rmtree(event)
    (folder / "attempts/a001.progress.json").unlink()


def measure(size: Any, device: str, steps: int, storage: str) -> dict[str, Any]:
    """All phases, in the process group that exists."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)
    began = time.perf_counter()
    off = train_off(size, device, steps // 2)
    gc.collect()
    on = train_on(size, device, steps, storage)
    gc.collect()
    recovered = recover(size, steps, storage)
    later = {step: on.losses[step] for step in range(steps + 1, steps + LATER + 1)}
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "steps": steps,
        "step_s_off": statistics.median(off.step_s),
        "step_s_on": statistics.median(on.step_s),
        "after_step_ms": {
            "with_event": _median_ms(on.with_event_s),
            "without_event": _median_ms(on.without_event_s),
        },
        "events": on.events,
        "layer_writes": on.layer_writes,
        "stall_ms_per_event": 1000 * on.stall_s / max(on.events, 1),
        "syncs": {"steps": on.steps_with_syncs, "where": dict(on.sync_places)},
        "losses_equal": all(on.losses[step] == loss for step, loss in off.losses.items()),
        "recovery": {
            "exact": recovered["losses"] == later,
            "first_step": recovered["first"],
            "max_age": recovered["max_age"],
            "resume_s": recovered["resume_s"],
        },
        "peak_device_bytes": torch.cuda.max_memory_allocated() if device == "cuda" else 0,
        "wall_s": time.perf_counter() - began,
    }


def _median_ms(seconds: list[float]) -> float | None:
    return 1000 * statistics.median(seconds) if seconds else None


def _start_process_group(device: str) -> None:
    """A group of one rank; DeepSpeed looks for these variables even then."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    os.environ["DS_ACCELERATOR"] = device
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic matrix products
    if device == "cpu":
        from cluster.locks import prepare_extensions

        os.environ |= prepare_extensions(tempfile.gettempdir())
    import deepspeed
    import torch

    if device == "cuda":
        torch.cuda.set_device(0)
    backend = "nccl" if device == "cuda" else "gloo"
    torch.distributed.init_process_group(backend)
    deepspeed.init_distributed(dist_backend=backend)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="what saving costs on one accelerator")
    parser.add_argument("--json", metavar="FILE", help="write the result there too")
    parser.add_argument("--storage", help="an empty folder for the events; default: a temporary one")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a model of a few thousand parameters")
    options = parser.parse_args(arguments)
    if options.steps < 4 * WARMUP:
        parser.error(f"--steps {options.steps}: at least {4 * WARMUP}, so that there are steps to measure")
    _start_process_group(options.device)
    from tests.gpu.model import BIG, TINY

    with tempfile.TemporaryDirectory(prefix="layercheck-") as temporary:
        storage = options.storage or temporary
        result = measure(TINY if options.tiny else BIG, options.device, options.steps, storage)
    text = json.dumps(result, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n")
    return 0 if result["losses_equal"] and result["recovery"]["exact"] and not result["syncs"]["steps"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
