"""[pure] What every rank knows of every layer, kept identical on all ranks from the reduced reports alone.

A rank that learnt of a commit from anywhere else than the report would choose other layers than its peers and
hang the next collective; so nothing but `observe` and `select` may change these numbers.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass, field
from math import ceil, inf, isfinite
from typing import Any, Self

from layercheck.config import LayerCheckConfig
from layercheck.decision import PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.layers import LayerMap, LayerSpec
from layercheck.lost import over_all
from layercheck.manifest import RecoveryPlan
from layercheck.tracking.budget import BudgetController
from layercheck.tracking.calibrate import (
    RateMeter,
    check_patterns,
    expected_interval,
    failure_factor,
    find_k0,
    find_lr_ref,
    measure_name,
)
from layercheck.tracking.policy import LayerFacts, PolicyFacts, Scale
from layercheck.tracking.reasons import Reasons
from layercheck.tracking.still import StillLayers
from layercheck.tracking.unsaved import Unsaved
from layercheck.tracking.versions import LayerState, Versions, first_staggers, live_full

_FIRST_MARGIN = 5
_DELAYS_KEPT = 20
_FAILURES_KEPT = 5


@dataclass(frozen=True, slots=True)
class LedgerEvents:
    """What one report told.

    Attributes:
        committed, lost: steps of the events that are now known to be so.
        still: trainable layers that have now shown no movement at all for a whole rotation.
    """

    committed: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    still: tuple[str, ...] = ()


@dataclass(slots=True)
class Ledger:
    """Drift, versions and thresholds of all layers. Made by `fresh` or `resumed`.

    Each step: `observe(report)`, `decide(ledger.facts(step, lr), config)`, `select(decision)`.

    Attributes:
        initial_lr: `lr_ref` where the settings name none: the optimizer groups' initial rate, if known.
        lag: steps by which a report may be older than the decision that uses it; 0 on CPU.
        lr: learning rate of the newest report, carried over a recovery.
        k0: global threshold at `lr_ref`; None until the warm-up is over.
        k_factor: failure-aware factor of all thresholds; `budget` holds another one in budget mode.
        began: last step that counted as done when this attempt began.
        gaps: steps run by each of the last attempts that failed, oldest first.
    """

    layer_map: LayerMap
    config: LayerCheckConfig
    initial_lr: float | None
    lag: int
    meter: RateMeter
    versions: Versions
    unsaved: Unsaved
    lr: float = 0.0
    k0: float | None = None
    lr_ref: float | None = None
    k_factor: float = 1.0
    began: int = 0
    gaps: tuple[int, ...] = ()
    budget: BudgetController | None = None
    still: StillLayers = field(default_factory=StillLayers)
    reasons: Reasons = field(default_factory=Reasons)
    _observed_step: int = 0
    _event_step: int = -1
    _delays: deque[int] = field(default_factory=lambda: deque(maxlen=_DELAYS_KEPT))

    # ------------------------------------------------------------------------------------------------ making

    @classmethod
    def fresh(
        cls, layer_map: LayerMap, config: LayerCheckConfig, initial_lr: float | None = None, lag: int = 0
    ) -> Self:
        """The ledger of a run that begins: no version of anything."""
        check_patterns(layer_map.trainable, config)
        versions = Versions({layer.name: LayerState() for layer in layer_map.layers})
        measure = measure_name(config)
        # From a residual on no distance is measured.
        unsaved = Unsaved.since(0, layer_map, config.drift.norm if config.residual.enabled else measure)
        ledger = cls(layer_map, config, initial_lr, lag, RateMeter(measure), versions, unsaved)
        if config.overhead_budget is not None:
            ledger.budget = BudgetController(config.overhead_budget)
        return ledger

    @classmethod
    def resumed(
        cls,
        layer_map: LayerMap,
        config: LayerCheckConfig,
        plan: RecoveryPlan,
        initial_lr: float | None = None,
        lag: int = 0,
    ) -> Self:
        """The ledger after a recovery: versions and D of the plan, calibrated numbers of its trainer state.

        D goes on where it was, so that the schedule of writes is that of a run without failures; starting at
        0 again would starve the slow layers when failures come faster than the interval.
        """
        ledger = cls.fresh(layer_map, config, initial_lr, lag)
        for version in plan.layers:
            layer = ledger.versions.layers[version.layer]
            layer.selected = layer.committed = version.step
            drift = plan.drift.get(version.layer, inf)
            layer.drift, layer.overdue = (drift, False) if isfinite(drift) else (0.0, True)
            if config.drift.kind == "displacement":
                layer.drift = 0.0  # the reference is gone: distance counts from the recovered weights
        ledger._observed_step = ledger._event_step = ledger.began = plan.resume_step - 1
        ledger.unsaved = Unsaved.since(ledger.began, layer_map, ledger.unsaved.measure)
        for version in (layer for layer in plan.layers if layer.trainable):
            if version.memory is None:
                ledger.unsaved.layers[version.layer].base = (version.step, version.attempt)
            elif config.residual.covers(version.layer):
                # Nobody here keeps the weights of its version: without a new one it has no residuals.
                ledger.versions.layers[version.layer].overdue = True
        ledger._restore(plan.trainer_state.get("layercheck", {}), plan)
        return ledger

    def _restore(self, state: Mapping[str, Any], plan: RecoveryPlan) -> None:
        self.meter = RateMeter.from_state(state.get("meter"), measure_name(self.config))
        self.lr_ref = state.get("lr_ref")
        self.lr = state.get("lr", self.lr_ref or 0.0)
        if self.budget is not None:
            self.budget.factor = state.get("budget_factor", 1.0)
        self._delays.extend(state.get("delays", ()))
        for name, stagger in state.get("stagger", {}).items():
            self.versions.layers[name].stagger = stagger
        for name in state.get("overdue", ()):
            # A second failure came before this layer was selected again: the journaled D says nothing of it.
            self.versions.layers[name].overdue = True
        newest_full = live_full(plan, self._names, int(state.get("newest_full", -1)))
        self.versions.newest_full = self.versions.committed_full = newest_full
        self._calibrate(self.began)
        gap = max(1, plan.t_fail - int(state.get("began", 0)))
        self.gaps = (*state.get("gaps", ()), gap)[-_FAILURES_KEPT:]
        self._adapt_to_failures(self.began)

    def to_state(self) -> dict[str, Any]:
        """JSON values that ride in `trainer_state["layercheck"]`; `resumed` reads them.

        A coordinator compares `selected` with the versions of its plan: a layer whose newest selected version
        is not in the plan is carried as due.
        """
        layers = self.versions.layers
        return {
            "k0": self.k0,
            "lr_ref": self.lr_ref,
            "lr": self.lr,
            "k_factor": self.k_factor,
            "budget_factor": 1.0 if self.budget is None else self.budget.factor,
            "delays": list(self._delays),
            "selected": {name: layer.selected for name, layer in layers.items()},
            "stagger": {name: layer.stagger for name, layer in layers.items() if layer.stagger != 1.0},
            "overdue": [name for name, layer in layers.items() if layer.overdue],
            "newest_full": self.versions.newest_full,
            "meter": self.meter.to_state(),
            "began": self.began,
            "gaps": list(self.gaps),
        }

    # --------------------------------------------------------------------------------------------- each step

    def observe(self, report: DriftReport) -> LedgerEvents:
        """Takes in one reduced report: losses, commits, a version that rotted, then the drift of its step.

        Losses come first: commits arrive as one step number, which would otherwise cover the lost ones too.
        Ranks that wait repeat the all-reduce at the same step; its drift counts once.
        """
        self.lr = report.lr
        lost = tuple(step for step in sorted(report.lost_steps) if self.versions.lose(step))
        committed = tuple(step for step in self.versions.in_flight if step <= report.committed_step)
        for step in lost:
            self.unsaved.lose(step)
        for step in committed:
            self._commit(step)
            self._delays.append(max(0, report.step - step))
        rotten = report.demoted
        newest = self.versions.layers[rotten.layer].committed if rotten is not None else -1
        if rotten is not None and self.versions.demote(rotten.layer, rotten.step):
            usable = max(rotten.step, self.began)
            self.unsaved.rotted(rotten.layer, newest, usable, self._observed_step)
        still: tuple[str, ...] = ()
        if report.step > self._observed_step:
            self._observed_step = report.step
            still = self.still.observe(report.delta, report.lr)
            self._add_drift(report)
            self.unsaved.observe(report)
            self._adapt_to_failures(report.step)
            self._adapt_to_budget(report)
        return LedgerEvents(committed, lost, still)

    def non_finite(self, report: DriftReport) -> str | None:
        """The first layer, in model order, whose drift of this step is not a finite number (I13)."""
        names = (layer.name for layer in self.layer_map.layers)
        return next((name for name in names if not isfinite(report.delta.get(name, 0.0))), None)

    def facts(self, step: int, lr: float) -> PolicyFacts:
        """What the policy may know at this step."""
        in_flight = self.versions.layers_in_flight
        return PolicyFacts(
            *astuple(self._scale(lr)),
            step=step,
            margin=self.margin,
            newest_full=self.versions.newest_full,
            event_taken=self._event_step == step,
            layers=tuple(self._facts_of(layer, in_flight) for layer in self.layer_map.trainable),
            frozen=self._unsaved_frozen,
        )

    def select(self, decision: PersistDecision) -> None:
        """The layers of a decision are now in flight, as the event of its step."""
        if not decision.writes:
            return
        assert self._event_step != decision.step, f"two events at step {decision.step}"
        self._event_step = decision.step
        full = any(write.reason == "full" for write in decision.writes)
        self._take(decision.step, [write.layer for write in decision.versions], full)
        self.unsaved.take_residuals(decision.step, [write.layer for write in decision.residuals])
        if full:
            self._stagger()
        else:
            self.reasons.count(decision.step, decision.versions)

    def saved_now(self, step: int) -> None:
        """A full event of this step, outside the policy's schedule, is committed (I10)."""
        for earlier in self.versions.in_flight:
            self._commit(earlier)
        self._take(step, self.full_set, full=True)
        self._commit(step)
        self._event_step = step
        self._stagger()

    def saved_parts(self, parts: Iterable[PersistDecision]) -> None:
        """Parts of a last save, outside the policy's schedule, are committed (preemption)."""
        for part in parts:
            self._take(part.step, [write.layer for write in part.writes], full=False)
            self._commit(part.step)

    # ---------------------------------------------------------------------------------------------- readings

    @property
    def margin(self) -> int:
        """Steps before `s_max` at which a layer is due by age: 1.5 times the slowest recent commit."""
        if not self._delays:
            return min(_FIRST_MARGIN, self.config.s_max // 4)
        return min(self.lag + 1 + ceil(1.5 * max(self._delays)), self.config.s_max // 4)

    @property
    def full_set(self) -> tuple[str, ...]:
        """What a full event of now holds: all trainable layers, and the frozen ones without a version."""
        return self._names + self._unsaved_frozen

    @property
    def drift(self) -> dict[str, float]:
        """Trainable layer -> accumulated drift D since its newest version, committed or in flight."""
        return {name: self.versions.layers[name].drift for name in self._names}

    def thresholds(self, lr: float) -> dict[str, float | None]:
        """Trainable layer -> K_l at this rate, as of now; None until K0 is calibrated."""
        of, layers, trainable = self._scale(lr).threshold, self.versions.layers, self.layer_map.trainable
        return {one.name: of(one.name, one.kind, layers[one.name].stagger, self.config) for one in trainable}

    def ages(self, step: int) -> dict[str, int]:
        """Trainable layer -> steps since its newest *committed* version."""
        return {name: step - max(self.versions.layers[name].committed, 0) for name in self._names}

    def max_age(self, step: int) -> int:
        """The largest age against committed versions, in steps (the bound of I1)."""
        return max(self.ages(step).values(), default=0)

    def weighted_age(self, step: int) -> float:
        """sum(n_l * age_l) / sum(n_l) against committed versions (paper 3.3)."""
        ages = self.ages(step)
        return over_all("", ((layer.numel, ages[layer.name]) for layer in self.layer_map.trainable))

    # ---------------------------------------------------------------------------------------------- internal

    def _scale(self, lr: float) -> Scale:
        budget = 1.0 if self.budget is None else self.budget.factor
        return Scale(lr, self.k0, self.lr_ref, self.k_factor * budget)

    def _take(self, step: int, names: Iterable[str], full: bool) -> None:
        names = tuple(names)
        self.versions.take(step, names, full)
        self.unsaved.take(step, names)

    def _commit(self, step: int) -> None:
        self.versions.commit(step)
        self.unsaved.commit(step)

    def _stagger(self) -> None:
        for name, stagger in first_staggers(self.layer_map).items():
            self.versions.layers[name].stagger = stagger

    @property
    def _names(self) -> tuple[str, ...]:
        return tuple(layer.name for layer in self.layer_map.trainable)

    @property
    def _unsaved_frozen(self) -> tuple[str, ...]:
        layers = self.versions.layers
        return tuple(
            layer.name
            for layer in self.layer_map.layers
            if self.config.frozen == "base" and not layer.trainable and layers[layer.name].selected < 0
        )

    def _facts_of(self, spec: LayerSpec, in_flight: frozenset[str]) -> LayerFacts:
        layer = self.versions.layers[spec.name]
        return LayerFacts(
            name=spec.name,
            kind=spec.kind,
            numel=spec.numel,
            drift=layer.drift,
            selected=layer.selected,
            committed=layer.committed,
            in_flight=spec.name in in_flight,
            overdue=layer.overdue,
            stagger=layer.stagger,
            residual=self.unsaved.residual_of(spec.name) if self.config.residual.covers(spec.name) else None,
        )

    def _add_drift(self, report: DriftReport) -> None:
        moved: dict[str, float] = {}
        for name in self._names:
            moved[name] = report.delta.get(name, 0.0)
            # With a lag, movement that the newest version already holds arrives after its selection.
            account = self.versions.account(name, report.step)
            if account is None:
                continue
            if report.displacement is not None:
                moved[name] = report.displacement.get(name, 0.0) - account.drift
            account.drift += moved[name]
        if self.k0 is None:
            if report.step > self.config.warmup_steps // 2:
                self.meter.observe(moved, report.lr)
            self._calibrate(report.step)

    def _calibrate(self, step: int) -> None:
        """Fixes `lr_ref` and K0 at the end of the warm-up, or as soon after it as a layer has moved."""
        if step < self.config.warmup_steps:
            return
        self.lr_ref = find_lr_ref(self.meter, self.config, self.lr_ref or self.initial_lr)
        if self.lr_ref is not None:
            self.k0 = find_k0(self.meter, self.config, self.layer_map.trainable, self.lr_ref)

    def _adapt_to_failures(self, step: int) -> None:
        if self.config.failure_aware and self.gaps:
            self.k_factor = failure_factor(self.gaps, self._interval(), step - self.began)

    def _adapt_to_budget(self, report: DriftReport) -> None:
        """A full event costs what it costs: the steps around it say nothing of K."""
        if self.budget is None or self.versions.newest_full >= report.step - 1:
            return
        is_busy = report.backlog > 0
        if report.step > self.config.warmup_steps + 1:
            if self.versions.newest_full == self.versions.committed_full:
                self.budget.observe(report.step_s, report.stall_s, is_busy)
        elif not is_busy:
            self.budget.watch(report.step_s, is_busy)

    def _interval(self) -> float:
        if self.k0 is None or self.lr_ref is None:
            return self.config.target_interval
        return expected_interval(self.k0, self.meter, self.config, self.layer_map.trainable, self.lr_ref)
