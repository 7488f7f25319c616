"""Runs a function on several gloo ranks of this machine, without Ray: nothing else shall use the cores."""

import multiprocessing
import os
import queue
import tempfile
import traceback
import warnings
from collections.abc import Callable
from typing import Any

import torch

from cluster.locks import prepare_extensions
from layercheck.errors import LayerCheckError


def run_on_ranks(world_size: int, limit_s: float, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `function(rank, *args)` on each rank of a fresh gloo group; returns the results in rank order.

    Raises:
        LayerCheckError: a rank failed, or gave no result within `limit_s`.
    """
    os.environ |= prepare_extensions(tempfile.gettempdir())
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    with tempfile.TemporaryDirectory(prefix="lc-ranks-") as folder:
        processes = [
            context.Process(
                target=_enter, args=(rank, world_size, f"{folder}/meet", answers, function, args), daemon=True
            )
            for rank in range(world_size)
        ]
        for process in processes:
            process.start()
        try:
            return _collect(answers, world_size, limit_s)
        finally:
            for process in processes:
                process.join(10)
                process.kill()


def _collect(answers: Any, world_size: int, limit_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < world_size:
        try:
            rank, result, error = answers.get(timeout=limit_s)
        except queue.Empty:
            raise LayerCheckError(f"a rank gave no result within {limit_s:g} s") from None
        if error:
            raise LayerCheckError(f"rank {rank} failed:\n{error}", rank=rank)
        results[rank] = result
    return [results[rank] for rank in range(world_size)]


def _enter(rank: int, world_size: int, meet: str, answers: Any, function: Any, args: Any) -> None:
    torch.set_num_threads(1)
    # DeepSpeed calls what torch has renamed, some hundred times a step.
    warnings.filterwarnings("ignore", category=FutureWarning)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world_size)}
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{meet}", rank=rank, world_size=world_size
        )
        answers.put((rank, function(rank, *args), None))
    except BaseException:
        answers.put((rank, None, traceback.format_exc()))
        raise
