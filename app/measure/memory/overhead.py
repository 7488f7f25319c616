"""What the memory tier and residuals add to a step: arms on the same ranks, interleaved step by step."""

from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from app.measure.arms import Arm, Samples, interleaved, job_of, saving
from app.measure.memory.keepers import RUN, OneNode
from app.measure.regime import CHECKPOINT, Regime
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.session import attach

ALONE = "saving"
ARMS: dict[str, dict[str, Any]] = {
    ALONE: {},
    "saving+memory": {"memory": {"enabled": True}},
    "saving+residuals": {"residual": {"enabled": True}},
}
"""Arm -> its settings beyond those of saving alone."""
Kept = tuple[CoordinatorClient, OneNode | None]
"""What runs outside the ranks, of one arm."""


def settings_of(arm: str) -> dict[str, Any]:
    """All settings of an arm's session."""
    return CHECKPOINT | ARMS[arm]


def measure_cost(rank: int, storage: str, regime: Regime, kept: Mapping[str, Kept]) -> dict[str, Samples]:
    """Runs all arms on this rank and returns their samples. Called on every rank.

    Args:
        rank: of this process.
        storage: folder of the runs.
        regime: how long.
        kept: arm -> what runs outside.
    """
    arms = {name: _arm(rank, storage, name, regime, *kept[name]) for name in ARMS}
    return interleaved(arms, regime)


def _arm(
    rank: int,
    storage: str,
    name: str,
    regime: Regime,
    coordinator: CoordinatorClient,
    vaults: OneNode | None,
) -> Arm:
    job = job_of(rank, dist.get_world_size(), storage, "layer", regime)
    place = f"{storage}/{name}"
    return saving(
        job,
        lambda: attach(
            job.engine, place, RUN, settings_of(name), coordinator, submission=name, vaults=vaults
        ),
    )
