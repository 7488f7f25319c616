"""How long a recovery takes, against the bare reading of the same files.

    python -m tests.bench.recovery [--ranks 2] [--pairs 7] [--json FILE]

A model of 30 million parameters on gloo ranks is trained for some steps, so that its newest versions lie in
several events, and then recovered from cold files (their pages are dropped before each timing).
`total_s` is plan + fetch + install of one recovery on the slowest rank. `fetch_of_raw` is the median, over
pairs that alternate, of the seconds that bare reads of the same byte ranges into one reused buffer take,
divided by the seconds of a fetch into the partitions and moments; all ranks at once in both.
"""

import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import layercheck
from tests.bench.command import measure_and_print, parser_of
from tests.harness import run_ranks

STEPS = 9
SETTINGS = {
    "warmup_steps": 3,
    "warmup_full_every": 3,
    "s_max": 40,
    "target_interval": 8,
    "selection": "round_robin",
    "full_every": 0,
}


def build() -> Any:
    """A ZeRO-3 engine of a Qwen2 with 30 million parameters."""
    import deepspeed
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {
        "train_micro_batch_size_per_gpu": 1,
        "zero_optimization": {"stage": 3},
        "bf16": {"enabled": True},
        "zero_allow_untested_optimizer": True,
    }
    config = Qwen2Config(
        vocab_size=2048, hidden_size=512, intermediate_size=1408, num_hidden_layers=10,
        num_attention_heads=8, num_key_value_heads=4, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    with deepspeed.zero.Init(config_dict_or_path=settings):
        model = Qwen2ForCausalLM(config)
    optimizer = torch.optim.AdamW(layercheck.layer_groups(model, 0.01), lr=1e-4)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)
    return engine


def train(storage: str) -> int:
    """Some steps; the run is then left as by a crash. Returns the number of parameters."""
    import torch

    engine = build()
    session = layercheck.attach(engine, storage, "run", SETTINGS, submission="trains")
    session.resume()
    for step in range(1, STEPS + 1):
        batch = torch.randint(0, 2048, (1, 16), generator=torch.Generator().manual_seed(step))
        engine.backward(engine(input_ids=batch, labels=batch).loss)
        engine.step()
        session.after_step(step, {"loss": 1.0})
    session.close("failed", "the bench ends it here")
    return sum(layer.numel for layer in session._zero3.layer_map.layers)


def recover(storage: str, pairs: int) -> dict[str, Any]:
    """Times one recovery by its phases, then fetches against bare reads."""
    from layercheck.config import parse_config
    from layercheck.coordination.in_process import in_process_client
    from layercheck.persistence.storage import open_storage
    from layercheck.recovery import install, restore
    from layercheck.recovery.begin import Submission, begin
    from layercheck.recovery.fetch import Fetcher
    from layercheck.zero3 import Zero3Engine

    zero3, store, config = Zero3Engine(build()), open_storage(storage, "run"), parse_config(SETTINGS)
    client = in_process_client(store, config, zero3.rank, zero3.world_size)
    _drop_pages(store.root)
    started = time.monotonic()
    grant = begin(zero3, store, client, config, Submission("run", "recovers", True, {}))
    plan_s = time.monotonic() - started
    assert grant.plan is not None
    plan = grant.plan
    own = [shard for layer in plan.layers for shard in layer.shards if shard.rank == zero3.rank]
    buffer = np.empty(max(shard.nbytes for shard in own), dtype=np.uint8)

    def raw() -> None:
        for shard in own:
            store.read_into(shard.file, shard.begin, buffer.data[: shard.nbytes])

    def fetch() -> None:
        assert not restore._fetch(zero3, Fetcher(store), plan.layers)

    install.start(zero3, plan, "base")
    seconds: dict[str, list[float]] = {"raw": [], "fetch": []}
    for pair in range(pairs):
        both: list[tuple[str, Callable[[], None]]] = [("raw", raw), ("fetch", fetch)]
        for name, act in both if pair % 2 else both[::-1]:
            seconds[name].append(_timed(store.root, act))
    _drop_pages(store.root)
    _, receipt = restore.restore(zero3, store, client, grant, plan_s, "base", None)
    client.close()  # type: ignore[attr-defined]
    return {
        "plan_s": receipt.plan_s,
        "fetch_s": receipt.fetch_s,
        "install_s": receipt.install_s,
        "events": len({layer.shards[0].event for layer in plan.layers}),
        "rank_bytes": sum(shard.nbytes for shard in own),
        **seconds,
    }


def _timed(root: str, act: Callable[[], None]) -> float:
    """Seconds of the slowest rank, from cold pages."""
    import torch
    import torch.distributed as dist

    _drop_pages(root)
    dist.barrier()
    started = time.perf_counter()
    act()
    spent = torch.tensor([time.perf_counter() - started], dtype=torch.float64)
    dist.all_reduce(spent, op=dist.ReduceOp.MAX)
    return float(spent)


def _drop_pages(root: str) -> None:
    """Files that were fsynced leave the page cache."""
    for path in Path(root).rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def measure(folder: Path, ranks: int, pairs: int) -> dict[str, Any]:
    storage = str(folder / "store")
    numel = run_ranks(ranks, folder, train, storage)[0]
    results = run_ranks(ranks, folder, recover, storage, pairs)
    ratios = [raw / fetch for raw, fetch in zip(results[0]["raw"], results[0]["fetch"], strict=True)]
    phases = {key: max(result[key] for result in results) for key in ("plan_s", "fetch_s", "install_s")}
    return {
        "ranks": ranks,
        "parameters": numel,
        "events": results[0]["events"],
        "read_bytes": sum(result["rank_bytes"] for result in results),
        **phases,
        "total_s": sum(phases.values()),
        "raw_s": statistics.median(results[0]["raw"]),
        "fetch_cold_s": statistics.median(results[0]["fetch"]),
        "fetch_of_raw": statistics.median(ratios),
        "ratios": ratios,
    }


def main() -> int:
    parser = parser_of("recovery", __doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--pairs", type=int, default=7)
    args = parser.parse_args()
    measure_and_print(args, lambda folder: measure(folder, args.ranks, args.pairs))
    return 0


if __name__ == "__main__":
    sys.exit(main())
