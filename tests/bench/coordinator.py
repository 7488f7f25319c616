"""How fast the coordinator takes shard records, how fast it commits, and what it remembers.

    python -m tests.bench.coordinator [--ranks 1024] [--events 120] [--json FILE]
    python -m tests.bench.coordinator --memory [--events 100000]

The coordinator is the real one on a local disk, commits fsynced, collection at work, the process set up as
that of its actor; what the ranks send arrives as bytes, as over Ray, and is unpickled inside the measured
time. The shard files are empty: their bytes never pass the coordinator, but collection has to delete them.

`records_per_s` counts rows (one layer of one rank) against all the time spent in calls, `records_per_cpu_s`
against the processor time of it: what is left of the figure on a machine that others use, too. A commit takes
from the arrival of the last rank's rows to the durable commit.
"""

import os
import pickle
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
from xxhash import xxh3_128_hexdigest

from cluster.coordinator import collect_rarely
from layercheck.config import LayerCheckConfig
from layercheck.coordination.coordinator import Coordinator
from layercheck.layers import LayerMap, LayerSpec, ParamSpec
from layercheck.manifest import EventId, RunRecord, ShardRecord
from layercheck.persistence.storage import Buffer, LocalStorage
from tests.bench.command import measure_and_print, parser_of

BLOCKS = 28
LAYERS = ("embed_tokens", *(f"layers.{i}" for i in range(BLOCKS)), "norm", "lm_head")
SETTINGS = LayerCheckConfig(warmup_steps=2, warmup_full_every=1, probation_steps=0)
WARM_PART = 0.1
"""Part of the events of a memory run before its growth counts: caches and pools fill first."""


class TimedStorage(LocalStorage):
    """Notes when the newest commit became durable."""

    committed_at = 0.0

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        super().write(path, chunks)
        if path.endswith("/commit.parquet"):
            self.committed_at = time.perf_counter()


def layer_map() -> LayerMap:
    return LayerMap(
        layers=tuple(
            LayerSpec(
                name=name,
                kind="block" if name.startswith("layers") else "other",
                trainable=True,
                params=(ParamSpec(name=f"{name}.w", shape=(1 << 20,), dtype="float32"),),
            )
            for name in LAYERS
        )
    )


def call_of(event: EventId, rank: int, ranks: int, layers: tuple[str, ...], reason: str) -> bytes:
    """What one rank sends: its rows of an event, and on rank 0 the state of the trainer."""
    rows = tuple(
        ShardRecord(
            layer=layer, step=event.step, attempt=event.attempt, rank=rank, world_size=ranks,
            file=event.shard_file(rank), begin=4096 * i, end=4096 * (i + 1),
            xxh3_128=xxh3_128_hexdigest(f"{event.step}{rank}{layer}".encode()), drift=1e-3, threshold=9e-4,
            age=100, reason=reason, snapshot_s=0.01, write_s=0.1,
        )
        for i, layer in enumerate(layers)
    )  # fmt: skip
    return pickle.dumps((event, rank, rows, state_of(event.step)))


def state_of(step: int) -> dict[str, Any]:
    selected = {name: max(0, step - i) for i, name in enumerate(LAYERS)}
    return {"step": step, "loss": 1.5, "lr_index": step, "layercheck": {"selected": selected}}


class Bench:
    """A run of `ranks` simulated ranks, step by step."""

    def __init__(self, folder: Path, ranks: int, *, with_files: bool) -> None:
        self.ranks, self.with_files = ranks, with_files
        self.storage = TimedStorage(str(folder / "run" / "layercheck"))
        self.coordinator = Coordinator(self.storage, SETTINGS)
        self.storage.write("probe", [b"x"])
        checkpoint = {"checkpoint": SETTINGS.model_dump(mode="json")}
        run = RunRecord(run_id="b", name="run", layer_map=layer_map(), optimizer="AdamW", config=checkpoint)
        self.coordinator.open_run(run, "probe")
        self.attempt = self.coordinator.begin_attempt("t", "s", ranks, "composite").attempt
        self.num_rows = 0
        self.busy_s = self.cpu_s = 0.0
        self.commit_s: list[float] = []
        self.longest_call_s: list[float] = []
        for step in range(3):
            self.event(step, LAYERS, "full")

    def event(self, step: int, layers: tuple[str, ...], reason: str = "drift") -> None:
        """All ranks report one event; the last of them makes it complete."""
        event = EventId(step=step, attempt=self.attempt)
        calls = [call_of(event, rank, self.ranks, layers, reason) for rank in range(self.ranks)]
        if self.with_files:
            folder = Path(self.storage.root, event.folder)
            folder.mkdir(parents=True)
            for rank in range(self.ranks):
                Path(self.storage.root, event.shard_file(rank)).touch()
            os.sync()  # a rank reports what is durable
        longest = arrived = 0.0
        for call in calls:
            arrived, cpu = time.perf_counter(), time.process_time()
            self.coordinator.record(*pickle.loads(call))
            spent = time.perf_counter() - arrived
            self.busy_s, self.cpu_s = self.busy_s + spent, self.cpu_s + time.process_time() - cpu
            longest = max(longest, spent)
        begun = time.perf_counter()
        reply = self.coordinator.heartbeat(self.attempt, step, state_of(step), dict.fromkeys(LAYERS, 1e-3))
        self.busy_s += time.perf_counter() - begun
        assert reply.committed_step == step, f"the event of step {step} was not committed: {reply}"
        self.num_rows += len(calls) * len(layers)
        self.commit_s.append(self.storage.committed_at - arrived)
        self.longest_call_s.append(longest)

    def forget(self) -> None:
        """Starts the measurement: what came before was the warm-up."""
        self.num_rows, self.busy_s, self.cpu_s, self.commit_s, self.longest_call_s = 0, 0.0, 0.0, [], []


def chosen(number: int) -> tuple[str, ...]:
    """One to four layers, all in turn: an event a third as large as the limit of a run with 31 layers."""
    count = 1 + number % 4
    first = (number * 5) % len(LAYERS)
    return tuple(LAYERS[(first + i) % len(LAYERS)] for i in range(count))


def speed(folder: Path, ranks: int, events: int) -> dict[str, Any]:
    bench = Bench(folder, ranks, with_files=True)
    bench.forget()
    for number in range(events):
        bench.event(3 + number, chosen(number))
    commit_ms = sorted(1000 * s for s in bench.commit_s)
    return {
        "ranks": ranks,
        "events": events,
        "rows": bench.num_rows,
        "records_per_s": bench.num_rows / bench.busy_s,
        "records_per_cpu_s": bench.num_rows / bench.cpu_s,
        "commit_p50_ms": statistics.median(commit_ms),
        "commit_p99_ms": commit_ms[int(0.99 * (len(commit_ms) - 1))],
        "commit_max_ms": commit_ms[-1],
        "longest_call_ms": 1000 * max(bench.longest_call_s),
    }


def memory(folder: Path, ranks: int, events: int) -> dict[str, Any]:
    bench = Bench(folder, ranks, with_files=False)
    process, samples = psutil.Process(), []
    warm = int(WARM_PART * events)
    for number in range(events):
        bench.event(3 + number, chosen(number))
        if number % max(1, events // 100) == 0:
            bench.forget()
            samples.append((number, process.memory_info().rss / 1e6))
    after_warm_up = [mb for number, mb in samples if number >= warm]
    return {
        "ranks": ranks,
        "events": events,
        "rss_mb_after_warm_up": after_warm_up[0],
        "rss_mb_at_the_end": after_warm_up[-1],
        "growth_mb": after_warm_up[-1] - after_warm_up[0],
        "rss_mb_every_tenth": [mb for _, mb in samples[:: max(1, len(samples) // 10)]],
        "files_in_history": len(bench.storage.list("history")),
        "event_folders": len(bench.storage.list("events")),
    }


def main() -> int:
    parser = parser_of("coordinator", __doc__)
    parser.add_argument("--ranks", type=int)
    parser.add_argument("--events", type=int)
    parser.add_argument("--memory", action="store_true", help="many small events: does anything grow?")
    args = parser.parse_args()
    collect_rarely()
    if args.memory:
        measure_and_print(args, lambda folder: memory(folder, args.ranks or 2, args.events or 100_000))
    else:
        measure_and_print(args, lambda folder: speed(folder, args.ranks or 1024, args.events or 120))
    return 0


if __name__ == "__main__":
    sys.exit(main())
