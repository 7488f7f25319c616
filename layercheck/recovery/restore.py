"""One recovery on all ranks: fetch the plan, have it amended for bad shards, install, write the receipt.

States, all ranks together unless said otherwise:
1. each rank fetches its parts of the plan; nothing live is touched.
2. one all-reduce counts the bad shards. None: go to 4.
3. rank 0 has the coordinator amend the plan; only the layers that changed are fetched again; back to 2.
4. all ranks hold the same whole plan: install. A failure before this point leaves the engine as it was.
"""

import time

import torch
import torch.distributed as dist

from layercheck.coordination.protocol import CoordinatorClient
from layercheck.manifest import AttemptGrant, BadShard, LayerPlan, Receipt, RecoveryPlan
from layercheck.persistence.storage import Storage
from layercheck.recovery.collectives import count_over_ranks, on_rank_zero
from layercheck.recovery.fetch import FetchedLayer, Fetcher
from layercheck.recovery.install import install
from layercheck.zero3 import Zero3Engine


def restore(
    zero3: Zero3Engine, storage: Storage, coordinator: CoordinatorClient, grant: AttemptGrant, plan_s: float
) -> tuple[AttemptGrant, Receipt]:
    """Brings the engine to the state of `grant.plan`. A collective.

    Returns:
        The grant that was carried out (amended if shards were bad) and its receipt.

    Raises:
        NoPlanError: without the bad shards nothing is left to recover from.
    """
    plan = grant.plan
    assert plan is not None, "a fresh run has nothing to restore"
    started = time.monotonic()
    fetcher = Fetcher(storage)
    layers: dict[str, FetchedLayer] = {}
    all_bad: list[BadShard] = []
    todo = plan.layers
    while True:
        fetched, bad = fetcher.fetch(todo, zero3.slices)
        layers.update(fetched)
        bad = _bad_on_any_rank(bad, zero3.collective_device)
        if not bad:
            break
        all_bad += bad
        before = {layer.layer: layer for layer in plan.layers}
        attempt = grant.attempt
        grant = on_rank_zero(lambda n=attempt, b=tuple(bad): coordinator.amend(n, b))  # type: ignore[misc]
        plan = grant.plan
        assert plan is not None, "an amended grant always has a plan"
        todo = tuple(layer for layer in plan.layers if _moved(before.get(layer.layer), layer))
        for layer in todo:
            layers.pop(layer.layer, None)
    fetch_s = time.monotonic() - started
    started = time.monotonic()
    install(zero3, layers)
    receipt = _receipt(grant, plan, tuple(all_bad))
    seconds = {"plan_s": plan_s, "fetch_s": fetch_s, "install_s": time.monotonic() - started}
    return grant, receipt.model_copy(update=seconds)


def _bad_on_any_rank(bad: list[BadShard], device: torch.device) -> list[BadShard]:
    if count_over_ranks(len(bad), device) == 0:
        return []
    gathered: list[list[BadShard]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, bad)
    unique = {(shard.file, shard.layer): shard for shards in gathered for shard in shards}
    return list(unique.values())


def _moved(before: LayerPlan | None, after: LayerPlan) -> bool:
    return before is None or before.shards[0].event != after.shards[0].event


def _receipt(grant: AttemptGrant, plan: RecoveryPlan, bad: tuple[BadShard, ...]) -> Receipt:
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
        nbytes=plan.nbytes,
        layers=tuple(
            {
                "name": layer.layer,
                "step": layer.step,
                "attempt": layer.attempt,
                "age": layer.age,
                "lost": layer.lost,
                "reason": layer.reason,
                "nbytes": layer.nbytes,
                "fallback": layer.fallback,
            }
            for layer in plan.layers
        ),
        bad=bad,
        detect_s=grant.detect_s,
        reschedule_s=grant.reschedule_s,
    )


def in_words(receipt: Receipt) -> str:
    """The line that tells a person what came back: mixed ages are never silent."""
    older = sum(bool(layer["fallback"]) for layer in receipt.layers)
    return (
        f"recovered ({receipt.mode}) after step {receipt.t_fail} (known from {receipt.t_fail_source}):"
        f" going on at step {receipt.resume_step} with layers 0 to {receipt.max_age} steps old,"
        f" {receipt.weighted_age:.1f} on average, {receipt.lost_steps:.1f} steps of progress lost;"
        f" {receipt.nbytes} bytes, plan {receipt.plan_s:.2f} s, fetch {receipt.fetch_s:.2f} s,"
        f" install {receipt.install_s:.2f} s; {len(receipt.bad)} bad shards, {older} layers fell back"
    )
