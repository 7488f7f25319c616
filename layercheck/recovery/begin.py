"""Opens a run on all ranks: the storage is seen by everyone, the run is ours, the plan is made."""

import logging
import os
import uuid
from dataclasses import dataclass
from typing import Any

from layercheck.config import LayerCheckConfig
from layercheck.coordination.journal import PROBE_PREFIX
from layercheck.coordination.protocol import AttemptGrant, CoordinatorClient
from layercheck.errors import StorageError
from layercheck.manifest import RunRecord
from layercheck.memory.held import Held
from layercheck.memory.tier import MemoryTier
from layercheck.model_facts import buffer_names, model_config, tied_names
from layercheck.persistence.storage import Storage
from layercheck.recovery.collectives import count_over_ranks, on_rank_zero
from layercheck.recovery.frozen import frozen_hashes
from layercheck.redact import without_secrets
from layercheck.tracking.warmup import told_at_the_start
from layercheck.zero3 import Zero3Engine

log = logging.getLogger(__name__)
_NOTHING: tuple[Held, ...] = ()


@dataclass(frozen=True, slots=True)
class Submission:
    """Who runs.

    Attributes:
        run: name of the run.
        name: tells a restart of one submission from another submission.
        takeover: fence off another submission even if it is alive.
        info: `config` and `tokenizer_files` for run.json.
    """

    run: str
    name: str
    takeover: bool
    info: dict[str, Any]


def begin(
    zero3: Zero3Engine,
    storage: Storage,
    coordinator: CoordinatorClient,
    config: LayerCheckConfig,
    submission: Submission,
    tier: MemoryTier | None = None,
) -> AttemptGrant:
    """Claims the next attempt. A collective; the same grant, or the same error, on every rank.

    With a memory tier its vaults are asked first: what was sealed is committed while its attempt still may.

    Raises:
        StorageError: rank 0 cannot write, or another rank or the coordinator does not see what it wrote.
        StoreMismatchError, RunIsLiveError, NoPlanError, RestartLoopError: see `CoordinatorClient`.
    """
    probe = on_rank_zero(lambda: _write_probe(storage))
    try:
        _check_all_ranks_see(probe, zero3, storage)
        hashes = frozen_hashes(zero3) if config.frozen == "source" else {}
        token, held = uuid.uuid4().hex, _NOTHING
        if tier is not None:
            token = on_rank_zero(lambda: uuid.uuid4().hex)
            held = tier.settle(token)
        return on_rank_zero(
            lambda: _claim(zero3, coordinator, config, submission, probe, hashes, token, held)
        )
    finally:
        if zero3.rank == 0:
            storage.delete(probe)


def _write_probe(storage: Storage) -> str:
    probe = f"{PROBE_PREFIX}{uuid.uuid4().hex}"
    storage.write(probe, [b"seen"])
    return probe


def _check_all_ranks_see(probe: str, zero3: Zero3Engine, storage: Storage) -> None:
    blind = storage.size(probe) is None
    if count_over_ranks(int(blind), zero3.collective_device):
        who = f"rank {zero3.rank} does not" if blind else "another rank does not"
        raise StorageError(
            f"storage {storage.root}: {who} see what rank 0 wrote there; give a `storage` all nodes share",
            path=storage.root,
        )


def _claim(
    zero3: Zero3Engine,
    coordinator: CoordinatorClient,
    config: LayerCheckConfig,
    submission: Submission,
    probe: str,
    hashes: dict[str, str],
    token: str,
    held: tuple[Held, ...],
) -> AttemptGrant:
    record = RunRecord(
        run_id=uuid.uuid4().hex,
        name=submission.run,
        layer_map=zero3.layer_map,
        optimizer=type(zero3.optimizer).__name__,
        optimizer_groups=zero3.optimizer_groups(),
        tied=tied_names(zero3.engine.module),
        buffers=buffer_names(zero3.engine.module),
        frozen_hashes=hashes,
        model_config_json=model_config(zero3.engine.module),
        tokenizer_files=submission.info.get("tokenizer_files", {}),
        config=without_secrets(
            {**submission.info.get("config", {}), "checkpoint": config.model_dump(mode="json")}, os.environ
        ),
    )
    for line in coordinator.open_run(record, probe):
        log.warning("setting changed since this run began: %s", line)
    grant = coordinator.begin_attempt(
        token, submission.name, zero3.world_size, config.recovery, submission.takeover, held
    )
    warmup = told_at_the_start(grant.r_b, config)
    for note in (*grant.notes, *([warmup] if warmup else [])):
        log.warning("%s", note)
    return grant
