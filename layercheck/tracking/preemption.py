"""[pure] The last save of a run that is about to be ended: which layers, in which order, in which parts.

Time may end between any two parts, so each part is an event of its own and the most valuable ones go first.
"""

from math import inf

from layercheck.config import LayerCheckConfig
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.tracking.policy import LayerFacts, PolicyFacts, threshold


def last_parts(facts: PolicyFacts, config: LayerCheckConfig) -> tuple[PersistDecision, ...]:
    """Every trainable layer whose newest version is older than this step, as parts in the order of saving.

    The most drifted per byte goes first. D is one number a layer whatever its size, so no other order saves a
    larger sum of D in the first n bytes (but for the last layer that fits). A layer that a recovery left due
    goes before all others. One without any measured drift goes last: its moments may have moved, and a
    restart is exact only if no layer is older than the step.

    Returns:
        Parts of at most `max_event_share` of the state; a layer larger than that goes alone.
    """
    room = config.max_event_share * sum(layer.numel for layer in facts.layers)
    parts: list[list[LayerFacts]] = []
    filled = inf
    for layer in sorted((layer for layer in facts.layers if layer.selected < facts.step), key=_rank):
        if filled + layer.numel > room:
            parts.append([])
            filled = 0
        parts[-1].append(layer)
        filled += layer.numel
    return tuple(
        PersistDecision(facts.step, tuple(_write(layer, facts, config) for layer in part)) for part in parts
    )


def _rank(layer: LayerFacts) -> tuple[float, int]:
    """Sorts what goes first to the front; of equals the oldest version first, then model order."""
    return (-inf if layer.overdue else -layer.drift / max(layer.numel, 1)), layer.selected


def _write(layer: LayerFacts, facts: PolicyFacts, config: LayerCheckConfig) -> LayerWrite:
    return LayerWrite(
        layer=layer.name,
        reason="preemption",
        drift=layer.drift,
        threshold=threshold(layer, facts, config) or 0.0,
        age=facts.step - max(layer.selected, 0),
    )
