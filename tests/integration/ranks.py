"""What the ranks of the session tests do: train, die, recover. Each function runs on every rank."""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open

import layercheck
from tests import micro
from tests.integration.late import make_late

CONFIG = {
    "warmup_steps": 8,
    "warmup_full_every": 4,
    "s_max": 16,
    "target_interval": 5,
    "full_every": 0,
    "embedding_factor": 2,
}
KILL_AT, STEPS = 27, 34
"""When the run of `killed_once` is killed, and how far it would have gone."""


def open_session(
    engine: Any, storage: str, submission: str = "one", store: Any = None, late: bool = False, **settings: Any
) -> Any:
    """A session of the run `run`; a restart has the same submission, so nothing waits for a takeover.

    `late`: as on an accelerator, see `late.py`.
    """
    settings = {**CONFIG, **settings}
    session = layercheck.attach(engine, storage, "run", settings, submission=submission, store=store)
    return make_late(session) if late else session


def note_state(shadow: str, session: Any, step: int) -> None:
    """Writes down what this rank's state really is after a step: `<shadow>/<step>-<rank>.npz`."""
    zero3 = session._zero3
    state = {
        f"{part.spec.name}/{key}": tensor.clone().numpy()
        for parts in zero3.slices.values()
        for part in parts
        for key, tensor in zero3.tensors(part).items()
    }
    np.savez(f"{shadow}/{step}-{zero3.rank}.npz", **state)


def shards(storage: Path) -> list[tuple[int, int, Path]]:
    """(step, rank, path) of all files in the events of a run, also of those that were never committed."""
    files = sorted((storage / "run/layercheck/events").glob("*/rank-*.safetensors"))
    return [(int(file.parent.name[5:13]), int(file.name[5:10]), file) for file in files]


def assert_live_bytes(storage: Path, shadow: Path, first: int = 1) -> int:
    """All files from step `first` on hold what `note_state` noted of their step; returns how many tensors."""
    checked = 0
    for step, rank, file in shards(storage):
        if step < first:
            continue
        live = np.load(shadow / f"{step}-{rank}.npz")
        with safe_open(file, "np") as shard:
            for name in shard.keys():  # noqa: SIM118 (not a dict)
                np.testing.assert_array_equal(shard.get_tensor(name), live[name], err_msg=f"{file} {name}")
                checked += 1
    return checked


def train(
    storage: str,
    steps: int,
    *,
    kill_at: int | None = None,
    save_at: int | None = None,
    seed: int = 0,
    each_step: Callable[[Any, int], None] | None = None,
    settings: dict[str, Any] | None = None,
    store: Any = None,
    late: bool = False,
    **build: Any,
) -> dict[str, Any]:
    """Trains up to `steps`, from wherever the store says. `kill_at`: SIGKILL itself after that step."""
    engine = micro.build(seed, **build)
    session = open_session(engine, storage, store=store, late=late, **(settings or {}))
    point = session.resume()
    losses, reports = {}, {}
    for step in range(point.step, steps + 1):
        losses[step] = micro.train_step(engine, step)
        reports[step] = session.after_step(step, {"loss": losses[step]})
        if each_step is not None:
            each_step(session, step)
        if step == save_at:
            session.save_now()
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if reports[step].preempted:
            break
    session.close()
    receipt = point.receipt.model_dump() if point.receipt else None
    return {"first": point.step, "losses": losses, "reports": reports, "receipt": receipt}


def train_without_session(steps: int, **build: Any) -> dict[int, float]:
    """The same training with the same layer groups and no session."""
    engine = micro.build(**build)
    return {step: micro.train_step(engine, step) for step in range(1, steps + 1)}
