"""[pure] What to copy to memory alone: a second threshold, far below that of the storage.

Kept identical on all ranks: fed by the reduced reports and by what all ranks have chosen alike. Progress is
lost in steps, so the age of a copy counts beside its movement: a threshold alone would leave what moves
slowly, or has a larger K (embeddings), behind for tens of steps.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Self

from layercheck.config import LayerCheckConfig
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.layers import LayerMap
from layercheck.manifest import RecoveryPlan
from layercheck.tracking.policy import LayerFacts, PolicyFacts, threshold

_AGE_FACTOR = 1.5
"""Age at which a copy is due, over the steps that a layer of mean rate takes to its threshold."""
_MOST_SHARES = 4
"""Of the state, in the first copies after steps at which a rank was behind."""


@dataclass(slots=True)
class Staged:
    """Each trainable layer's newest copy in memory, of whatever event.

    Attributes:
        moved: layer -> path since that copy; infinity if there is none.
        step: layer -> its step.
        waited: steps since the last one at which no rank was behind.
    """

    moved: dict[str, float]
    step: dict[str, int]
    waited: int = 0

    @classmethod
    def since(cls, step: int, layer_map: LayerMap, plan: RecoveryPlan | None) -> Self:
        """An attempt that begins after `step`: what it got from memory is still there."""
        kept = {layer.layer for layer in plan.layers if layer.memory is not None} if plan else set()
        names = [layer.name for layer in layer_map.trainable]
        return cls({name: 0.0 if name in kept else inf for name in names}, dict.fromkeys(names, step))

    def observe(self, report: DriftReport) -> None:
        """Adds the movement of one step. What a copy holds already, and a lag reports late, is its own."""
        for name, step in self.step.items():
            if report.step > step:
                self.moved[name] += report.delta.get(name, 0.0)

    def take(self, step: int, names: Iterable[str]) -> None:
        """These layers are copied now."""
        for name in names:
            if name in self.moved:
                self.moved[name], self.step[name] = 0.0, step

    def copied(self, decision: PersistDecision, is_behind: bool) -> None:
        """What `copies` found is copied now; `is_behind`: nothing could be, because of some rank."""
        self.take(decision.step, [write.layer for write in decision.writes])
        self.waited = self.waited + 1 if is_behind else 0


def copies(
    facts: PolicyFacts,
    staged: Staged,
    chosen: PersistDecision,
    config: LayerCheckConfig,
    backlog: float,
) -> PersistDecision:
    """The layers to copy to memory alone after `facts.step`.

    None while any rank has not sealed what it took before: then an older copy could go on one rank whose
    newer one another rank never had. `k_ratio: 0` takes all layers; else those that moved by this part of K,
    or whose copy is older than such a movement usually takes, the most due first, up to `max_event_share` of
    the state for this step and for each that had to be waited for, but at least one.

    Args:
        facts: what the policy knew.
        staged: the newest copies; those of `chosen` are taken already.
        chosen: what goes to the storage after this step.
        config: settings.
        backlog: bytes that the slowest rank had not sealed, by the newest report.
    """
    if facts.step <= config.warmup_steps or backlog > 0:
        return PersistDecision(facts.step)
    ratio, taken = config.memory.k_ratio, {write.layer for write in chosen.versions}
    due = []
    for layer in facts.layers:
        limit = _limit(layer, facts, config)
        if layer.name not in taken and limit is not None:
            due.append((_pressure(layer.name, limit, facts.step, staged, config), layer, limit))
    due = [one for one in due if one[0] > 1]
    shares = config.max_event_share * min(1 + staged.waited, _MOST_SHARES)
    room = shares * sum(layer.numel for layer in facts.layers) if ratio else inf
    writes: list[LayerWrite] = []
    for _, layer, limit in sorted(due, key=lambda item: -item[0]):
        if not writes or layer.numel <= room:
            writes.append(_write(layer, staged, limit, facts.step))
            room -= layer.numel
    return PersistDecision(facts.step, tuple(writes))


def _pressure(name: str, limit: float, step: int, staged: Staged, config: LayerCheckConfig) -> float:
    """How due a layer is: above 1 it is, larger goes first."""
    if not limit:
        return inf
    oldest = _AGE_FACTOR * config.memory.k_ratio * config.target_interval
    return max(staged.moved[name] / limit, (step - staged.step[name]) / oldest)


def _limit(layer: LayerFacts, facts: PolicyFacts, config: LayerCheckConfig) -> float | None:
    whole = threshold(replace(layer, stagger=1.0), facts, config)
    return 0.0 if config.memory.k_ratio == 0 else whole and config.memory.k_ratio * whole


def _write(layer: LayerFacts, staged: Staged, limit: float, step: int) -> LayerWrite:
    return LayerWrite(
        layer=layer.name,
        reason="memory",
        drift=staged.moved[layer.name],
        threshold=limit,
        age=step - max(layer.selected, 0),
    )
