"""One recovery on all ranks: fetch the plan, have it amended for bad shards, install, write the receipt.

States, all ranks together unless said otherwise:
1. each rank reads its parts of the plan, layer by layer, straight into its fp32 partitions and moments, and
   checks them there. What the model computes with is not touched. A storage that does not answer one rank
   ends the attempt on all of them, and no version is given up for it.
2. one all-reduce counts the bad shards. None: go to 4.
3. rank 0 has the coordinator amend the plan; only the layers that changed are fetched again, over what did
   not pass its check; back to 2.
4. all ranks hold the same whole plan: the weights follow. A failure before this point takes the partitions
   back to the untouched weights, so that nobody trains on half a state.
"""

import time
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist

from layercheck import lost
from layercheck.coordination.protocol import AttemptGrant, CoordinatorClient
from layercheck.errors import LayerCheckError, StorageError
from layercheck.manifest import BadShard, LayerPlan, RecoveryPlan
from layercheck.memory.tier import MemoryTier
from layercheck.persistence.bases import BaseCopies
from layercheck.persistence.storage import Storage
from layercheck.receipt import Receipt
from layercheck.recovery import install
from layercheck.recovery.collectives import count_over_ranks, on_rank_zero
from layercheck.recovery.fetch import Fetcher
from layercheck.zero3 import Zero3Engine

_IN_WORDS = {"memory": "the memory of their node", "peer": "the memory of another node"}


def restore(
    zero3: Zero3Engine,
    storage: Storage,
    coordinator: CoordinatorClient,
    grant: AttemptGrant,
    plan_s: float,
    frozen: str,
    bases: BaseCopies | None,
    tier: MemoryTier | None,
) -> tuple[AttemptGrant, Receipt]:
    """Brings the engine to the state of `grant.plan`. A collective.

    Args:
        zero3: the engine.
        storage: the run's `layercheck` folder.
        coordinator: amends the plan.
        grant: of this attempt.
        plan_s: seconds that the plan took, for the receipt; no wait for another submission is in it.
        frozen: the setting of that name.
        bases: get the weights of the plan's versions.
        tier: what it has is read from there.

    Returns:
        The grant that was carried out (amended if shards were bad) and its receipt.

    Raises:
        NoPlanError: without the bad shards nothing is left to recover from.
        StorageError: the storage does not answer.
    """
    assert grant.plan is not None, "a fresh run has nothing to restore"
    started = time.monotonic()
    layers = [layer.layer for layer in grant.plan.layers]
    install.start(zero3, grant.plan, frozen)
    reader = tier.reader(storage) if tier is not None else None
    if reader is not None:
        fetcher = Fetcher(reader, bases=bases, pass_over=reader.pass_over)
    else:
        fetcher = Fetcher(storage, bases=bases)
    try:
        grant, plan, bad = _fetch_all(zero3, fetcher, coordinator, grant, grant.plan)
    except BaseException:
        zero3.abandon_install(layers)
        raise
    fetch_s = time.monotonic() - started
    started = time.monotonic()
    install.finish(zero3)
    sources = tier.sources(plan, reader) if tier is not None and reader is not None else {}
    receipt = _receipt(grant, plan, bad, sources)
    seconds = {"plan_s": plan_s, "fetch_s": fetch_s, "install_s": time.monotonic() - started}
    return grant, receipt.model_copy(update=seconds)


def _fetch_all(
    zero3: Zero3Engine,
    fetcher: Fetcher,
    coordinator: CoordinatorClient,
    grant: AttemptGrant,
    plan: RecoveryPlan,
) -> tuple[AttemptGrant, RecoveryPlan, tuple[BadShard, ...]]:
    """States 1 to 3: the grant and the plan that were carried out, and the shards that were bad."""
    all_bad: tuple[BadShard, ...] = ()
    todo = plan.layers
    while bad := _fetch_on_all_ranks(zero3, fetcher, todo):
        all_bad += bad
        before = {layer.layer: layer for layer in plan.layers}
        attempt = grant.attempt
        grant = on_rank_zero(lambda n=attempt, b=bad: coordinator.amend(n, b))  # type: ignore[misc]
        assert grant.plan is not None, "an amended grant always has a plan"
        plan = grant.plan
        todo = tuple(layer for layer in plan.layers if _moved(before.get(layer.layer), layer))
        _check_all_replaced(bad, todo)
    return grant, plan, all_bad


def _fetch_on_all_ranks(
    zero3: Zero3Engine, fetcher: Fetcher, todo: tuple[LayerPlan, ...]
) -> tuple[BadShard, ...]:
    """States 1 and 2. A rank that left alone would hang the others, so all of them leave.

    Raises:
        StorageError: on every rank, if the storage does not answer one of them.
    """
    refused: StorageError | None = None
    bad: list[BadShard] = []
    try:
        bad = _fetch(zero3, fetcher, todo)
    except StorageError as error:
        refused = error
    if count_over_ranks(int(refused is not None), zero3.collective_device):
        raise refused or StorageError("another rank cannot read the storage: see its error (`storage`)")
    return _bad_on_any_rank(bad, zero3.collective_device)


def _fetch(zero3: Zero3Engine, fetcher: Fetcher, todo: tuple[LayerPlan, ...]) -> list[BadShard]:
    """Fetches layers into the partitions, one at a time; returns what could not be had."""
    found = (_fetch_one(zero3, fetcher, plan) for plan in todo)
    return [shard for shard in found if shard is not None]


def _fetch_one(zero3: Zero3Engine, fetcher: Fetcher, plan: LayerPlan) -> BadShard | None:
    install.clear(zero3, plan.layer)
    fetched = fetcher.fetch(plan, zero3.slices[plan.layer], partial(install.room, zero3))
    if isinstance(fetched, BadShard):
        return fetched
    install.put(zero3, fetched)
    return None


def _bad_on_any_rank(bad: list[BadShard], device: torch.device) -> tuple[BadShard, ...]:
    if count_over_ranks(len(bad), device) == 0:
        return ()
    gathered: list[list[BadShard]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, bad)
    unique = {(shard.file, shard.layer): shard for shards in gathered for shard in shards}
    return tuple(unique.values())


def _moved(before: LayerPlan | None, after: LayerPlan) -> bool:
    return before is None or before.events != after.events


def _check_all_replaced(bad: tuple[BadShard, ...], todo: tuple[LayerPlan, ...]) -> None:
    """What was read of a bad shard still lies in the partitions.

    Raises:
        LayerCheckError: an amended plan has no other version for one of them.
    """
    replaced = {layer.layer for layer in todo}
    for shard in bad:
        if shard.layer not in replaced:
            raise LayerCheckError(
                f"the amended plan keeps layer {shard.layer} of step {shard.step}, but {shard.file} is bad",
                layer=shard.layer,
                path=shard.file,
            )


def _receipt(
    grant: AttemptGrant, plan: RecoveryPlan, bad: tuple[BadShard, ...], sources: Mapping[str, str]
) -> Receipt:
    return Receipt(
        attempt=grant.attempt,
        mode=plan.mode,
        t_fail=plan.t_fail,
        t_fail_source=plan.t_fail_source,
        resume_step=plan.resume_step,
        world_size=plan.world_size,
        max_age=plan.max_age,
        weighted_age=plan.weighted_age,
        lost_steps=plan.lost_steps,
        lost_drift=plan.lost_drift,
        measure=plan.measure,
        nbytes=plan.nbytes,
        layers=tuple(
            layer.row
            | {"reason": layer.reason, "nbytes": layer.nbytes, "fallback": layer.fallback}
            | ({"source": sources[layer.layer]} if sources else {})
            for layer in (planned.loaded for planned in plan.layers)
        ),
        bad=bad,
        detect_s=grant.detect_s,
        reschedule_s=grant.reschedule_s,
        wait_s=grant.wait_s,
    )


def in_words(receipt: Receipt) -> str:
    """The line that tells a person what came back: mixed ages are never silent."""
    fell_back = sum(bool(layer["fallback"]) for layer in receipt.layers)
    added = sum(layer["residual"] is not None for layer in receipt.layers)
    newer = f" {added} layers with a residual: their moments are older than their weights;" if added else ""
    for tier in ("memory", "peer"):
        count = sum(layer.get("source") == tier for layer in receipt.layers)
        newer += f" {count} layers from {_IN_WORDS[tier]};" if count else ""
    return (
        f"recovered ({receipt.mode}) after step {receipt.t_fail} (known from {receipt.t_fail_source}):"
        f" going on at step {receipt.resume_step} with {_ages_in_words(receipt)} steps old,"
        f" {receipt.weighted_age:.1f} on average, {receipt.lost_steps:.1f} steps of progress lost,"
        f" movement {lost.in_words(receipt.lost_drift, receipt.measure, added > 0)};"
        f"{newer} {receipt.nbytes} bytes, plan {receipt.plan_s:.2f} s, fetch {receipt.fetch_s:.2f} s,"
        f" install {receipt.install_s:.2f} s; {len(receipt.bad)} bad shards, {fell_back} layers fell back"
    )


def _ages_in_words(receipt: Receipt) -> str:
    """The youngest and the oldest layer that trains: a frozen one is of any age, and loses nothing by it."""
    ages = [layer["age"] for layer in receipt.layers if not layer["name"].endswith(".frozen")]
    youngest = min(ages, default=receipt.max_age)
    if youngest == receipt.max_age:
        return f"all layers {receipt.max_age}"
    return f"layers {youngest} to {receipt.max_age}"
