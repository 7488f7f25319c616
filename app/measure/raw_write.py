"""How close a shard write comes to the bare system calls: same bytes, same number of files, alternating."""

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from layercheck.persistence.hashed import HashedBytes
from layercheck.persistence.shard_file import ShardAbout, ShardLayout, ShardTensor, SliceMeta, layout
from layercheck.persistence.storage import LocalStorage

_BLOCK = 4 << 20


def write_rate_ratio(folder: Path, nbytes: int, num_pairs: int) -> float:
    """Median seconds of a raw write over median seconds of ours; 1 means that nothing is lost.

    Args:
        folder: where to write; both kinds go there.
        nbytes: size of one file, that of a typical event.
        num_pairs: alternating pairs; the order within a pair alternates too.
    """
    blocks = [np.random.default_rng(i).bytes(_BLOCK) for i in range(max(1, nbytes // _BLOCK))]
    shard = _layout(_BLOCK * len(blocks))
    storage = LocalStorage(str(folder / "ours"))
    seconds: dict[str, list[float]] = {"raw": [], "ours": []}
    for pair in range(num_pairs + 1):
        kinds: list[tuple[str, Callable[[], None]]] = [
            ("raw", lambda n=pair: _raw(folder / "raw", n, [shard.header, *blocks])),  # type: ignore[misc]
            ("ours", lambda n=pair: _ours(storage, n, shard, blocks)),  # type: ignore[misc]
        ]
        for kind, write in kinds if pair % 2 else reversed(kinds):
            started = time.perf_counter()
            write()
            if pair:  # the first pair makes the folders and warms the allocator
                seconds[kind].append(time.perf_counter() - started)
    return statistics.median(seconds["raw"]) / statistics.median(seconds["ours"])


def _layout(data_bytes: int) -> ShardLayout:
    numel = data_bytes // 4
    meta = SliceMeta(parameter="weight", layer="layer", step=1, shape=(numel,), offset=0, numel=numel)
    about = ShardAbout(step=1, attempt=1, rank=0, world_size=1)
    return layout([ShardTensor("weight", "fp32", "layer", "F32", numel)], [meta], about)


def _ours(storage: LocalStorage, number: int, shard: ShardLayout, blocks: list[bytes]) -> None:
    content = HashedBytes(shard, iter([memoryview(block) for block in blocks]))
    storage.write(f"event-{number:03d}/rank-00000.safetensors", content)
    assert content.digests


def _raw(folder: Path, number: int, chunks: list[bytes]) -> None:
    target = folder / f"event-{number:03d}" / "file"
    target.parent.mkdir(parents=True, exist_ok=True)
    temp = target.with_name(".tmp")
    fd = os.open(temp, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    try:
        for chunk in chunks:
            view = memoryview(chunk)
            while view:
                view = view[os.write(fd, view) :]
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temp, target)
    for path in (target.parent, folder):
        parent = os.open(path, os.O_RDONLY)
        os.fsync(parent)
        os.close(parent)
