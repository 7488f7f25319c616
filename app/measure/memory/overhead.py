"""What the memory tier, residuals and other methods add to a step: arms on the same ranks, interleaved."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from app.baselines.gemini.host import HostCalls
from app.measure.arms import Arm, Samples, interleaved, job_of, saving
from app.measure.memory.keepers import RUN, OneNode
from app.measure.peers import Peers, peer_arm
from app.measure.regime import CHECKPOINT, Regime
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.session import attach

Settings = Mapping[str, dict[str, Any]]
"""Arm of LayerCheck -> its settings beyond those of `CHECKPOINT`; the others are compared with the first."""
_NEVER: dict[str, Any] = {"k0": 1e6, "s_max": 100_000}
_ALWAYS: dict[str, Any] = {"k0": 1e-12, "s_max": 100_000}
USUAL: Settings = {
    "saving": {},
    "saving+memory": {"memory": {"enabled": True}},
    "saving+residuals": {"residual": {"enabled": True}},
    "rare versions+residuals": {
        "target_interval": 600,
        "s_max": 1000,
        "residual": {"enabled": True, "k_ratio": 9 / 600},
    },
}
"""The last: the intervals of a run that wants little lost at the bytes of versions alone."""
EVERY_STEP: Settings = {
    "nothing saved": _NEVER,
    "versions": _ALWAYS,
    "memory": _NEVER | {"memory": {"enabled": True, "k_ratio": 0}},
    "residuals": _NEVER | {"residual": {"enabled": True, "k_ratio": 1e-16}},
}
"""As much as the policy puts into an event (`max_event_share`), each step; memory takes the whole state."""
Kept = tuple[CoordinatorClient, OneNode | None]
"""What runs outside the ranks, of one arm."""


def measure_cost(
    rank: int,
    storage: str,
    regime: Regime,
    settings: Settings,
    kept: Mapping[str, Kept],
    peers: Peers,
    stores: Mapping[str, HostCalls],
) -> dict[str, Samples]:
    """Runs all arms on this rank and returns their samples. Called on every rank.

    Args:
        rank: of this process.
        storage: folder of the runs.
        regime: how long.
        settings: of LayerCheck's arms.
        kept: arm -> what runs outside.
        peers: arms of other methods.
        stores: of the hosts that keep GEMINI's copies.
    """
    ours = {
        name: _arm(rank, storage, name, CHECKPOINT | own, regime, *kept[name])
        for name, own in settings.items()
    }
    theirs = {name: peer_arm(rank, storage, name, items, regime, stores) for name, items in peers.items()}
    return interleaved(ours | theirs, regime)


def _arm(
    rank: int,
    storage: str,
    name: str,
    settings: dict[str, Any],
    regime: Regime,
    coordinator: CoordinatorClient,
    vaults: OneNode | None,
) -> Arm:
    job = job_of(rank, dist.get_world_size(), storage, "layer", regime)
    place = f"{storage}/{name}"
    return saving(
        job,
        lambda: attach(job.engine, place, RUN, settings, coordinator, submission=name, vaults=vaults),
    )
