"""An event larger than the staging memory is told by the bytes that are staged, not by those of its file."""

import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch

from layercheck.config import parse_config
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.layers import ParamSpec
from layercheck.partition import ParamSlice
from layercheck.persistence.copier import ThreadCopier
from layercheck.persistence.quantise import Code
from layercheck.persistence.shard_file import MASTER
from layercheck.persistence.snapshot import Snapshot, SnapshotTaker, StagingPool
from layercheck.session import Session

NUMEL = 4096
SPEC = ParamSpec(name="norm.weight", shape=(NUMEL,), dtype="float32")
ENGINE: Any = SimpleNamespace(
    rank=0,
    world_size=1,
    slices={"norm": [ParamSlice(SPEC, "norm", 0, NUMEL, 0, 0)]},
    tensors=lambda part: {MASTER: torch.arange(float(NUMEL))},
    scalars=lambda part: {},
    on_update=lambda before, after: lambda: None,
)


def test_a_residual_that_is_larger_than_the_staging_memory_is_told_with_what_it_takes_there() -> None:
    """16 kB of fp32 weights stream through 8 kB; the file of 8-bit codes would have fitted into them."""
    pool, alerts, taken = StagingPool(8192), list[str](), list[Snapshot]()

    def submit(snapshot: Snapshot, pending: object) -> None:
        taken.append(snapshot)
        threading.Thread(target=lambda: list(snapshot.stream.chunks(10)), daemon=True).start()

    session: Any = SimpleNamespace(
        _config=parse_config({"staging_bytes": 8192}),
        _rng="keyed",
        _zero3=ENGINE,
        meter=SimpleNamespace(newest_pending=None),
        watchdog=SimpleNamespace(phase=lambda name, limit_s: nullcontext()),
    )
    opened: Any = SimpleNamespace(
        number=1,
        ledger=SimpleNamespace(to_state=dict),
        writer=SimpleNamespace(submit=submit),
        taker=SnapshotTaker(ENGINE, pool, 10.0, ThreadCopier(10.0), Code(8, 64)),
        limited_s=lambda limit_s: limit_s,
        sealed=None,
        alert=alerts.append,
    )
    residual = LayerWrite("norm", "residual", 1.0, 0.5, 3, base=(5, 0))
    Session._save(session, opened, PersistDecision(7, (residual,)), {"step": 7}, part=1)
    assert taken[0].staged_bytes == 4 * NUMEL > pool.capacity_bytes
    assert taken[0].layout.total < pool.capacity_bytes
    assert len(alerts) == 1
    assert f"of {4 * NUMEL} bytes on rank 0 is larger than the staging memory" in alerts[0]
