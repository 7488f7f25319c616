"""Runs a function on several gloo ranks; a forkserver with the heavy imports preloaded makes that cheap."""

import multiprocessing
import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from cluster.locks import clear_stale_locks, prepare_extensions

PRELOAD = ["torch", "deepspeed", "transformers.models.qwen2.modeling_qwen2", "pyarrow.parquet", "tests.micro"]
GROUP_S = 180
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(PRELOAD)


class RankFailedError(AssertionError):
    """A rank raised; the message is its traceback."""


def run_ranks(world_size: int, tmp: Path, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Calls `function(*args)` on each rank inside a fresh gloo group and returns the results in rank order.

    A rank that ends without a result (it was killed) gives None.
    """
    extensions = _extensions()
    rendezvous = tmp / f"rendezvous-{os.urandom(6).hex()}"
    pipes, processes = [], []
    for rank in range(world_size):
        reader, writer = _context.Pipe(duplex=False)
        process = _context.Process(
            target=_enter,
            args=(rank, world_size, str(rendezvous), writer, extensions, function, args),
            daemon=True,
        )
        process.start()
        writer.close()
        pipes.append(reader)
        processes.append(process)
    try:
        results = [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.join(1)
            process.kill()
            process.join()
    failures = [text for kind, text in results if kind == "error"]
    if failures:
        raise RankFailedError("\n".join(failures))
    return [value for _, value in results]


def _receive(pipe: Any) -> tuple[str, Any]:
    if not pipe.poll(GROUP_S):
        return "error", f"a rank gave no result within {GROUP_S} s"
    try:
        kind, payload = pickle.loads(pipe.recv_bytes())
    except EOFError:
        return "killed", None
    return kind, payload


@cache
def _extensions() -> dict[str, str]:
    """Where the ranks find DeepSpeed's op. A test that was killed must leave no lock for the next one."""
    found = prepare_extensions(tempfile.gettempdir())
    os.environ |= found
    return found


def _enter(
    rank: int,
    world_size: int,
    rendezvous: str,
    pipe: Any,
    extensions: dict[str, str],
    function: Any,
    args: Any,
) -> None:
    clear_stale_locks(extensions["TORCH_EXTENSIONS_DIR"])
    os.environ |= extensions
    import deepspeed
    import torch

    torch.set_num_threads(1)
    os.environ |= {"LOCAL_RANK": str(rank), "RANK": str(rank), "WORLD_SIZE": str(world_size)}
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size
        )
        deepspeed.init_distributed(dist_backend="gloo")
        pipe.send_bytes(pickle.dumps(("value", function(*args))))
    except BaseException:
        pipe.send_bytes(pickle.dumps(("error", f"rank {rank}:\n{traceback.format_exc()}")))
    finally:
        pipe.close()
        os._exit(0)
