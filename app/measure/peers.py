"""Arms of the methods that LayerCheck is compared with, on the same ranks as its own.

They save from engines with layer groups, since what they capture is the state by layer. So their steps are to
be compared with those of such an engine whose session saves nothing, not with those of stock groups.
"""

import json
from collections.abc import Mapping, Sequence

import torch.distributed as dist

from app.baselines.gemini.host import HostCalls
from app.baselines.protocol import Baseline
from app.config import Config
from app.measure.arms import Arm, job_of
from app.measure.hosts import ProcessHosts
from app.measure.regime import Regime
from app.methods import Maker, committer_of, open_baseline
from layercheck.persistence.storage import Storage
from layercheck.zero3 import Zero3Engine

Peers = Mapping[str, Sequence[str]]
"""Arm -> its `--set` items: the method, and how often it saves."""


def peer_arm(
    rank: int, storage: str, name: str, items: Sequence[str], regime: Regime, stores: Mapping[str, HostCalls]
) -> Arm:
    """The arm of a method, or of none. A collective.

    Of its threads none counts: those of commits come and go, those of gloo are none of Python's.

    Args:
        rank: of this process.
        storage: folder of all runs.
        name: of the arm.
        items: its `--set` items.
        regime: how long.
        stores: of GEMINI's hosts; rank r lives on the r-th.
    """
    place = json.dumps(f"{storage}/{name}")
    job = job_of(rank, dist.get_world_size(), storage, "layer", regime, (*items, f"run.storage={place}"))
    method = job.config.checkpoint.method
    if method == "none":
        return Arm(job)
    make = _gemini_on(ProcessHosts(stores, rank)) if method == "gemini" else None
    session = open_baseline(job, name, make)
    session.resume()
    return Arm(job, session)


def _gemini_on(hosts: ProcessHosts) -> Maker:
    from app.baselines.gemini.method import GeminiCopies

    def make(config: Config, zero3: Zero3Engine, storage: Storage) -> Baseline:
        committer = committer_of(config, zero3, storage)
        return GeminiCopies(zero3, committer, hosts, config.checkpoint.baseline.gemini)

    return make
