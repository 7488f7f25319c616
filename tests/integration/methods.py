"""What the ranks of the baseline tests do: a micro model trained under one method, killed, recovered."""

import os
import signal
from collections.abc import Callable
from typing import Any

from app.baselines.commits import CommitStore
from app.baselines.committer import Committer, own_group
from app.baselines.protocol import Baseline
from app.baselines.session import BaselineSession, RunPlace
from layercheck.persistence.storage import LocalStorage
from layercheck.zero3 import Zero3Engine
from tests import micro
from tests.micro import train_step

Make = Callable[[Zero3Engine, Committer], Baseline]
"""Makes the method of a rank. A function of a module: it goes to other processes."""


def open_method(engine: Any, folder: str, make: Make, store: Any = None, keep: int = 2) -> BaselineSession:
    """A session of the method `m` of the run in `folder`."""
    storage = store or LocalStorage(folder)
    zero3 = Zero3Engine(engine)
    committer = Committer(CommitStore(storage, "m"), own_group(60), len(zero3.layer_map.layers), keep)
    place = RunPlace(storage, folder, "m", "one", hang_s=0, wait_s=60, flush_s=60)
    return BaselineSession(make(zero3, committer), zero3, place)


def state_of(zero3: Zero3Engine) -> dict[str, Any]:
    """Every tensor of this rank and the Adam steps, copied."""
    state: dict[str, Any] = {}
    for part in (part for parts in zero3.slices.values() for part in parts):
        for key, tensor in zero3.tensors(part).items():
            state[f"{part.spec.name}/{key}"] = tensor.clone().numpy()
        state[f"{part.spec.name}/scalars"] = zero3.scalars(part)
    return state


def train(
    folder: str,
    make: Make,
    steps: int,
    *,
    kill_at: int | None = None,
    seed: int = 0,
    store: Any = None,
    look: Callable[[BaselineSession, int], None] | None = None,
    **build: Any,
) -> dict[str, Any]:
    """Trains to `steps` from wherever the storage says. `kill_at`: SIGKILL of this rank after that step."""
    engine = micro.build(seed, **build)
    session = open_method(engine, folder, make, store)
    point = session.resume()
    losses, reports = {}, {}
    for step in range(point.step, steps + 1):
        losses[step] = train_step(engine, step)
        reports[step] = session.after_step(step, {"loss": losses[step]})
        if look is not None:
            look(session, step)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
    session.save_now({"loss": losses.get(steps)})
    state = state_of(session._zero3)
    session.close()
    return {
        "first": point.step,
        "receipt": None if point.receipt is None else point.receipt.model_dump(),
        "losses": losses,
        "reports": reports,
        "state": state,
        "costs": session.costs(),
    }
