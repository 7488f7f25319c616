"""A run without a model: made-up drift and commit delays through the real ledger and policy."""

from collections.abc import Callable
from dataclasses import dataclass, field

from layercheck.config import LayerCheckConfig, parse_config
from layercheck.decision import PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.layers import LayerKind, LayerMap, LayerSpec, ParamSpec
from layercheck.tracking.ledger import Ledger, LedgerEvents
from layercheck.tracking.policy import decide


def layer(name: str, numel: int, kind: LayerKind = "block", trainable: bool = True) -> LayerSpec:
    param = ParamSpec(name=f"{name}.weight", shape=(numel,), dtype="float32")
    return LayerSpec(name=name, kind=kind, trainable=trainable, params=(param,))


def transformer(blocks: int, block_numel: int = 1000, embedding_numel: int = 3000) -> LayerMap:
    """embed_tokens, blocks, norm and lm_head, in model order."""
    return LayerMap(
        layers=(
            layer("embed_tokens", embedding_numel, "embedding"),
            *(layer(f"layers.{index}", block_numel) for index in range(blocks)),
            layer("norm", 10, "other"),
            layer("lm_head", embedding_numel, "other"),
        )
    )


def config(**settings: object) -> LayerCheckConfig:
    return parse_config(dict(settings))


@dataclass
class SimulatedRun:
    """Steps a ledger. `delay(step)`: commit delay of an event in steps; `loses(step)`: is it lost."""

    layer_map: LayerMap
    config: LayerCheckConfig
    delta: Callable[[int, str], float]
    delay: Callable[[int], int] = lambda step: 1
    loses: Callable[[int], bool] = lambda step: False
    lr: Callable[[int], float] = lambda step: 1e-4
    ledger: Ledger = field(init=False)
    decisions: list[PersistDecision] = field(default_factory=list)
    events: list[LedgerEvents] = field(default_factory=list)
    max_ages: list[int] = field(default_factory=list)
    weighted_ages: list[float] = field(default_factory=list)
    waits: int = 0
    blocked_at: int | None = None
    """Step at which nothing was left to wait for: a session ends here with one error (I1)."""
    _due_at: dict[int, int] = field(default_factory=dict)
    """Event step -> clock at which its fate is known."""
    _clock: int = 0
    _committed: int = -1

    def __post_init__(self) -> None:
        self.ledger = Ledger.fresh(self.layer_map, self.config)

    def run(self, first: int, last: int) -> "SimulatedRun":
        for step in range(first, last + 1):
            self.step(step)
            if self.blocked_at is not None:
                break
        return self

    def step(self, step: int) -> None:
        """One optimizer step; blocks like a session while the decision says so."""
        self.max_ages.append(self.ledger.max_age(step))
        decision = self._turn(step)
        while decision.must_wait:
            if not self.ledger.versions.in_flight:
                self.blocked_at = step
                return
            self.waits += 1
            decision = self._turn(step)
        self.weighted_ages.append(self.ledger.weighted_age(step))

    def _turn(self, step: int) -> PersistDecision:
        self._clock += 1
        self.events.append(self.ledger.observe(self._report(step)))
        decision = decide(self.ledger.facts(step, self.lr(step)), self.config)
        self.ledger.select(decision)
        if decision.writes:
            self._due_at[step] = self._clock + self.delay(step)
        self.decisions.append(decision)
        return decision

    def _report(self, step: int) -> DriftReport:
        """Commits in step order; a lost event does not hold up the later ones."""
        lost = []
        for event in sorted(self._due_at):
            if self._due_at[event] > self._clock:
                break
            del self._due_at[event]
            if self.loses(event):
                lost.append(event)
            else:
                self._committed = event
        delta = {layer.name: self.delta(step, layer.name) for layer in self.layer_map.trainable}
        return DriftReport(
            step, delta if step else {}, self.lr(step), committed_step=self._committed, lost_steps=tuple(lost)
        )

    def selective(self) -> list[PersistDecision]:
        """The selective events, in order."""
        return [one for one in self.decisions if one.writes and one.writes[0].reason != "full"]

    def selective_numel(self) -> int:
        """Elements written by selective events."""
        by_name = self.layer_map.by_name
        return sum(by_name[write.layer].numel for one in self.selective() for write in one.writes)
