"""All lives of a run, each in a process of its own; its coordinator lives on in another one, as under Ray."""

import multiprocessing
import os
import shutil
import signal
import tempfile
import warnings
from collections.abc import Callable
from multiprocessing.managers import BaseManager
from pathlib import Path
from typing import Any

from app.measure.residuals.notes import Notes, notes_of
from app.measure.residuals.regime import run_config
from app.measure.residuals.spec import KilledRun
from cluster.locks import clear_stale_locks, prepare_extensions
from layercheck.config import LayerCheckConfig
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.errors import LayerCheckError
from layercheck.persistence.storage import open_storage

LIFE_LIMIT_S = 3 * 3600.0
_PRELOADED = ["torch", "deepspeed", "transformers.models.llama.modeling_llama", "app.measure.residuals.life"]
_CALLS = [name for name in vars(CoordinatorClient) if not name.startswith("_")]


class Keeper(BaseManager):
    """The process of a coordinator."""


def _coordinator(storage: str, run: str, config: LayerCheckConfig) -> Coordinator:
    return Coordinator(open_storage(storage, run), config)


Keeper.register("coordinator", _coordinator, exposed=_CALLS)


def run_lives(folder: Path, run: KilledRun, say: Callable[[str], None]) -> Path:
    """Runs one to its end through all kills, unless that was done; returns the folder of the run.

    Raises:
        LayerCheckError: a life ended otherwise than by its kill or after the last step, or took too long.
    """
    folder = folder.absolute()
    config = run_config(folder, run)
    place, notes = Path(config.run.folder), Notes(notes_of(folder, run))
    if not notes.has_finished(run):
        shutil.rmtree(place, ignore_errors=True)  # of a run that was broken off
        shutil.rmtree(notes.folder)
        with Keeper(ctx=multiprocessing.get_context("spawn")) as keeper:
            settings = (config.run.storage_root, config.run.name, config.checkpoint.settings)
            _live_on(folder, run, keeper.coordinator(*settings), say)  # type: ignore[attr-defined]
        found = len(notes.recoveries())
        if found != len(run.kills):
            raise LayerCheckError(f"run {run.name}: {found} recoveries after {len(run.kills)} kills")
        notes.finish(run)
    return place


def _live_on(folder: Path, run: KilledRun, coordinator: Any, say: Callable[[str], None]) -> None:
    for number in range(len(run.kills) + 1):
        last = number == len(run.kills)
        code = _one_life(str(folder), run, coordinator)
        if code != (0 if last else -signal.SIGKILL):
            raise LayerCheckError(f"run {run.name}: life {number + 1} ended with code {code}")
        say(f"{run.name}: {'done' if last else f'kill {number + 1} of {len(run.kills)}'}")


def _one_life(folder: str, run: KilledRun, coordinator: CoordinatorClient) -> int | None:
    """The exit code of a process that has trained: below 0 for the signal that ended it."""
    extensions = prepare_extensions(tempfile.gettempdir())
    clear_stale_locks(extensions["TORCH_EXTENSIONS_DIR"])
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOADED)
    with tempfile.TemporaryDirectory(prefix="lc-life-") as meeting:
        args = (folder, run, coordinator, extensions, f"{meeting}/place")
        process = context.Process(target=_enter, args=args, daemon=True)
        process.start()
        process.join(LIFE_LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise LayerCheckError(f"run {run.name}: a life took more than {LIFE_LIMIT_S:.0f} s")
    return process.exitcode


def _enter(folder: str, run: KilledRun, coordinator: Any, extensions: dict[str, str], meeting: str) -> None:
    os.environ |= extensions | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    # DeepSpeed calls what torch has renamed, some hundred times a step.
    warnings.filterwarnings("ignore", category=FutureWarning)
    import torch

    from app.measure.residuals.life import live

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", init_method=f"file://{meeting}", rank=0, world_size=1)
    live(folder, run, coordinator)
    os._exit(0)
