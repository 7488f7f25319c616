"""A small training script for `ckpt-chaos`: kill it at any file event of a save, start it again, compare.

    pip install ckpt-chaos
    ckpt-chaos run --step-regex "resumed after step ([0-9]+)" --result-file "{out}/final.json" \
        -- python -m tests.crash.chaos --method layercheck --out {out}

The tool (https://pypi.org/project/ckpt-chaos/) knows nothing of mixed ages: what comes back has to be the
state of one step. So LayerCheck takes full events alone here and recovers in mode `uniform`. `--method
deepspeed` is DeepSpeed's own `save_checkpoint` and `load_checkpoint`, at the same steps. What it said
of both is kept in `ckpt_chaos/`.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from xxhash import xxh3_128_hexdigest

import layercheck
from cluster.locks import prepare_extensions
from tests import micro

STEPS, EVERY = 12, 4
SETTINGS = {
    "recovery": "uniform",
    "selection": "full",
    "target_interval": EVERY,
    "warmup_steps": EVERY,
    "warmup_full_every": EVERY,
    "probation_steps": 0,
}
AfterStep = Callable[[int, float], Any]


def with_layercheck(engine: Any, out: str) -> tuple[int, AfterStep, Callable[[], Any]]:
    """(first step, what to call after each step, what to call at the end)."""
    session = layercheck.attach(engine, out, "run", SETTINGS, submission="chaos")
    point = session.resume()
    return point.step, lambda step, loss: session.after_step(step, {"loss": loss}), session.close


def with_deepspeed(engine: Any, out: str) -> tuple[int, AfterStep, Callable[[], Any]]:
    """See `with_layercheck`."""
    engine.load_checkpoint(out)

    def save(step: int, loss: float) -> None:
        if step % EVERY == 0:
            engine.save_checkpoint(out, tag=f"step-{step}")

    return engine.global_steps + 1, save, lambda: None


METHODS = {"layercheck": with_layercheck, "deepspeed": with_deepspeed}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.crash.chaos")
    parser.add_argument("--method", choices=sorted(METHODS), required=True)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    # Else a kill at start-up leaves a lock for which every later start waits without limit.
    os.environ |= prepare_extensions(args.out)
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    with tempfile.TemporaryDirectory() as meet:
        torch.distributed.init_process_group("gloo", init_method=f"file://{meet}/meet", rank=0, world_size=1)
        engine = micro.build()
        first, after_step, end = METHODS[args.method](engine, str(Path(args.out).absolute()))
        print(f"resumed after step {first - 1}", flush=True)
        for step in range(first, STEPS + 1):
            after_step(step, micro.train_step(engine, step))
        end()
    digests = [xxh3_128_hexdigest(flat.numpy().tobytes()) for flat in _weights(engine)]
    Path(args.out, "final.json").write_text(json.dumps(digests))
    return 0


def _weights(engine: Any) -> list[torch.Tensor]:
    return [flat.detach() for flat in engine.optimizer.fp32_partitioned_groups_flat]


if __name__ == "__main__":
    sys.exit(main())
