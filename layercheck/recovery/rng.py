"""The random number generators of a rank, for loops whose draws are no function of the step number.

They ride in the rank's own shard file of each event, so they are as durable and as checked as the weights
beside them, and cost no collective. Recovery takes those of the newest event of the plan that every rank can
read: exact when that event is of the last step (`save_now`), else the draws of the steps since it come again.
"""

import base64
import random
import zlib

import numpy as np
import torch

from layercheck.errors import StorageError
from layercheck.manifest import EventId, RecoveryPlan
from layercheck.persistence.shard_file import RngState, read_header
from layercheck.persistence.storage import Readable
from layercheck.recovery.collectives import count_over_ranks
from layercheck.zero3 import Zero3Engine

_NUMPY_KIND = "MT19937"


def capture() -> RngState:
    """The states now: torch (CPU and the current accelerator), numpy's global one, Python's."""
    version, words, gauss_next = random.getstate()
    numpy = np.random.get_state(legacy=False)
    assert isinstance(numpy, dict)
    assert numpy["bit_generator"] == _NUMPY_KIND, numpy["bit_generator"]
    return RngState(
        torch=_pack(torch.get_rng_state().numpy().tobytes()),
        cuda=_pack(torch.cuda.get_rng_state().numpy().tobytes()) if torch.cuda.is_available() else None,
        python=_pack(np.array(words, dtype="<u4").tobytes()),
        python_version=version,
        python_gauss=gauss_next,
        numpy=_pack(numpy["state"]["key"].astype("<u4").tobytes()),
        numpy_position=int(numpy["state"]["pos"]),
        numpy_gauss=float(numpy["gauss"]) if numpy["has_gauss"] else None,
    )


def restore(state: RngState) -> None:
    """Puts the states back; that of an accelerator only where there is one."""
    torch.set_rng_state(_bytes_tensor(state.torch))
    if state.cuda is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(_bytes_tensor(state.cuda))
    words = np.frombuffer(_unpack(state.python), dtype="<u4")
    random.setstate((state.python_version, tuple(int(word) for word in words), state.python_gauss))
    has_gauss = state.numpy_gauss is not None
    key = np.frombuffer(_unpack(state.numpy), dtype="<u4").astype(np.uint32)
    np.random.set_state((_NUMPY_KIND, key, state.numpy_position, int(has_gauss), state.numpy_gauss or 0.0))


def find(zero3: Zero3Engine, storage: Readable, plan: RecoveryPlan) -> tuple[str, RngState | None]:
    """This rank's states from the newest event of the plan that has them for all ranks. A collective.

    Returns:
        What the receipt says, and the states; None if no event of the plan holds them for this world size.
    """
    worlds = {shard.event: shard.world_size for layer in plan.layers for shard in layer.all_shards}
    for event in sorted(worlds, key=lambda event: (event.step, event.attempt, event.part), reverse=True):
        fits = worlds[event] == zero3.world_size
        state = _read(storage, event, zero3.rank) if fits else None
        if count_over_ranks(int(state is None), zero3.collective_device) == 0:
            return f"captured at step {event.step}", state
    return f"not restored: no event of the plan holds the states of {zero3.world_size} ranks", None


def _read(storage: Readable, event: EventId, rank: int) -> RngState | None:
    try:
        return read_header(storage, event.shard_file(rank)).about.rng
    except StorageError:
        return None  # raising on this rank alone would hang the others; an older event has to do


def _pack(raw: bytes) -> str:
    return base64.b64encode(zlib.compress(raw)).decode("ascii")


def _unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text))


def _bytes_tensor(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(_unpack(text)), dtype=torch.uint8)
