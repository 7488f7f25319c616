"""The summary of a run for people and scripts, from what the store holds. Pure."""

from collections.abc import Mapping
from typing import Any

from layercheck.coordination.deaths import Death, Left, left_by, lost_by
from layercheck.coordination.facts import StoreFacts, by_layer
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.errors import NoPlanError
from layercheck.manifest import ROW_KEYS, RecoveryPlan


def summarize(facts: StoreFacts) -> dict[str, Any]:
    """The keys of `layercheck status --json`.

    Ages count from the newest step known; `recoverable` says whether a plan exists, `read_bytes` what it
    would read, `lost_steps` and `lost_drift` what a failure now would lose (see `RecoveryPlan`). `drift` is
    the journaled D_l, `threshold` the K_l at the layer's last write. All of these say what the storage alone
    would give. `if_dies` says what the death of a worker, a node, the cluster would leave with what lies in
    memory: tier, step and lost steps of each layer, and `lost_steps` of the whole; `at_best` where another
    node may have more.
    """
    plan = plan_now(facts)
    newest = facts.newest
    left = left_by(facts, plan) if plan else {}
    layers = _layers(facts, plan, left)
    return {
        "run": facts.run.name,
        "attempt": newest.attempt if newest else 0,
        "step": _newest_step(facts),
        "world_size": newest.world_size if newest else 0,
        "layers": layers,
        "max_age": plan.max_age if plan else None,
        "weighted_age": plan.weighted_age if plan else None,
        "lost_steps": plan.lost_steps if plan else None,
        "lost_drift": plan.lost_drift if plan else None,
        "measure": plan.measure if plan else "",
        "if_dies": lost_by(plan, left) if plan else None,
        "recoverable": plan is not None,
        "read_bytes": plan.nbytes if plan else 0,
    }


def plan_now(facts: StoreFacts) -> RecoveryPlan | None:
    """What the next attempt would load, None where nothing can or need be loaded."""
    try:
        return make_plan(facts, PlanRequest())
    except NoPlanError:
        return None


def _newest_step(facts: StoreFacts) -> int:
    newest = facts.newest
    if newest is None:
        return 0
    beat = facts.progress.get(newest.attempt)
    return max(newest.r_b, beat.step if beat else 0, facts.newest_commit_step(newest.attempt))


def _layers(
    facts: StoreFacts, plan: RecoveryPlan | None, left: Mapping[str, Mapping[Death, Left]]
) -> list[dict[str, Any]]:
    """One entry for each layer that has a live version: the newest undamaged one."""
    step = _newest_step(facts)
    versions = by_layer(facts.live_commits(facts.lineage), facts.run.layer_map)
    planned = {layer.layer: layer for layer in plan.layers} if plan else {}
    rows = []
    for name, all_of in versions.items():
        version = next((v for v in all_of if v.key not in facts.bad_saves), None)
        if version is None:
            continue
        first, layer = version.shards[0], planned.get(name)
        rows.append(
            (layer.row if layer else dict.fromkeys(ROW_KEYS))
            | {
                "name": name,
                "step": version.event.step,
                "attempt": version.event.attempt,
                "age": max(0, step - version.event.step),
                "if_dies": {death: one.to_json() for death, one in left[name].items()} if layer else None,
                "nbytes": version.nbytes,
                "drift": plan.drift.get(name, 0.0) if plan else None,
                "threshold": first.threshold,
                "reason": first.reason,
            }
        )
    return rows
