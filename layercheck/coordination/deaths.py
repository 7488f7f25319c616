"""[pure] From where each layer would come back if a worker, a node or the whole cluster died now.

The storage outlives all three. What lies in the memory of the nodes is known as far as the ranks told it with
their heartbeat. With a worker none of that dies; with its node the parts of its ranks do, unless another node
has them: such copies run behind without a word, so they are what may be left at best.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from layercheck.coordination.facts import StoreFacts
from layercheck.lost import over_all
from layercheck.manifest import LayerPlan, RecoveryPlan

Death = Literal["worker", "node", "cluster"]
DEATHS: tuple[Death, ...] = ("worker", "node", "cluster")


@dataclass(frozen=True, slots=True)
class Left:
    """What a layer goes on from: the save of `step`; `lost` steps are gone. `at_best` may be left as well."""

    tier: Literal["memory", "peer", "storage"]
    step: int
    lost: int
    at_best: "Left | None" = None

    def to_json(self) -> dict[str, Any]:
        """As `layercheck status --json` has it."""
        value = {"tier": self.tier, "step": self.step, "lost": self.lost}
        return value | ({"at_best": self.at_best.to_json()} if self.at_best else {})


def left_by(facts: StoreFacts, plan: RecoveryPlan) -> dict[str, dict[Death, Left]]:
    """Layer of the plan -> what each death would leave of it.

    Args:
        facts: what the store holds.
        plan: of now, from the storage alone.
    """
    known = in_memory(facts) if plan.mode in ("composite", "strict") else {}  # a roll-back takes none of it
    steps: Mapping[str, int] = known.get("layers", {})
    since = facts.newest.r_b if facts.newest else 0
    return {
        layer.layer: _left(layer, steps.get(layer.layer, -1), max(0, known.get("replicas", 0)), since, plan)
        for layer in plan.layers
    }


def in_memory(facts: StoreFacts) -> Mapping[str, Any]:
    """What `tracking/sealed.py` said in the newest heartbeat; empty without a tier, or after the end."""
    beat = facts.progress.get(facts.newest.attempt) if facts.newest else None
    if beat is None or beat.ended == "completed":
        return {}
    found: Mapping[str, Any] = (beat.trainer_state.get("layercheck") or {}).get("memory") or {}
    return found


def lost_by(plan: RecoveryPlan, left: Mapping[str, Mapping[Death, Left]]) -> dict[str, dict[str, float]]:
    """Death -> `lost_steps` over the whole model, and `at_best` where more may be left."""
    found: dict[str, dict[str, float]] = {}
    for death in DEATHS:
        layers = [(one.numel, left[one.layer][death]) for one in plan.layers if one.trainable]
        found[death] = {"lost_steps": over_all("", ((numel, one.lost) for numel, one in layers))}
        if any(one.at_best for _, one in layers):
            best = ((numel, (one.at_best or one).lost) for numel, one in layers)
            found[death]["at_best"] = over_all("", best)
    return found


def _left(layer: LayerPlan, step: int, replicas: int, since: int, plan: RecoveryPlan) -> dict[Death, Left]:
    saved = layer.residual.step if layer.residual else layer.step
    stored = Left("storage", saved, layer.lost)
    if not layer.trainable or step < saved:
        return {"worker": stored, "node": stored, "cluster": stored}
    lost = max(0, plan.t_fail - max(step, since))
    peer = Left("peer", step, lost) if replicas else None
    return {
        "worker": Left("memory", step, lost),
        "node": Left("storage", saved, layer.lost, peer),
        "cluster": stored,
    }
