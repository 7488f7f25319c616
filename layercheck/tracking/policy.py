"""[pure] Which layers to save after a step: facts in, decision out.

Nothing here waits, measures, or keeps state: equal facts give equal decisions, which is how all ranks choose
the same layers without a further collective (I3), and how a simulation runs the very rule of production.
"""

import hashlib
from dataclasses import dataclass
from math import inf

from layercheck.config import LayerCheckConfig
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.layers import LayerKind
from layercheck.tracking.calibrate import layer_factor

_K_FLOOR = 0.01
"""K_min as a part of K0: at the end of a decaying schedule K must not reach 0."""


@dataclass(frozen=True, slots=True)
class ResidualFacts:
    """What is known of a layer that can have a residual now.

    Attributes:
        base: (step, attempt) of its newest version, which is committed; attempt 0 for this one.
        drift: path since its newest version or residual.
        is_first: it had no residual since that version.
        stagger: factor of the threshold for the first one after a recovery, else 1.
    """

    base: tuple[int, int]
    drift: float
    is_first: bool
    stagger: float = 1.0


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """What is known of one trainable layer after a step.

    Attributes:
        drift: accumulated drift D since the newest version, committed or in flight.
        selected: step of the newest version, committed or in flight; -1 for none.
        committed: step of the newest committed version; -1 for none.
        in_flight: a version of this layer is selected and not yet known to be committed.
        overdue: due whatever its drift: its selected event never became live before a recovery, or its newest
            version is of no use for residuals.
        stagger: factor of K for the first write after a full event, else 1.
        residual: None where none can be taken.
    """

    name: str
    kind: LayerKind
    numel: int
    drift: float
    selected: int
    committed: int
    in_flight: bool = False
    overdue: bool = False
    stagger: float = 1.0
    residual: ResidualFacts | None = None


@dataclass(frozen=True, slots=True)
class Scale:
    """What the thresholds of all layers have in common at one step.

    Attributes:
        lr: largest learning rate over the groups of this step.
        k0: global threshold at `lr_ref`; None until it is calibrated (then only age selects).
        k_factor: factor of all thresholds, for failures and for the budget.
    """

    lr: float
    k0: float | None
    lr_ref: float | None
    k_factor: float

    def threshold(self, name: str, kind: LayerKind, stagger: float, config: LayerCheckConfig) -> float | None:
        """K_l(t) = max(K0_l lr_t / lr_ref, K_min), times `k_factor` and the stagger; None without K0."""
        if self.k0 is None or self.lr_ref is None:
            return None
        k0 = self.k0 * layer_factor(name, kind, config)
        return max(k0 * self.lr / self.lr_ref, _K_FLOOR * k0) * self.k_factor * stagger


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyFacts(Scale):
    """All that a decision depends on; identical on every rank.

    Attributes:
        margin: steps before `s_max` at which a layer is due by age, for the time a commit takes.
        newest_full: step of the newest full event, committed or in flight; -1 for none.
        event_taken: an event of this very step exists already, so no other can be taken.
        frozen: frozen layers without a version.
    """

    step: int
    margin: int
    newest_full: int
    event_taken: bool
    layers: tuple[LayerFacts, ...]
    frozen: tuple[str, ...] = ()


def decide(facts: PolicyFacts, config: LayerCheckConfig) -> PersistDecision:
    """The layers to save after `facts.step`, and whether to block until the storage catches up.

    A full event is owed at step 0, in the warm-up every `warmup_full_every` steps and at its end (the base),
    later every `full_every` steps; one that was lost is owed again at once. After the warm-up any other step
    may take a selective event, of versions and residuals. Asking again at the same step, as ranks that wait
    do, selects nothing twice.
    """
    writes: tuple[LayerWrite, ...] = ()
    if facts.event_taken:
        pass
    elif facts.newest_full < full_anchor(facts, config):
        writes = _full_event(facts, config)
    elif facts.step > config.warmup_steps:
        writes = _selective_event(facts, config)
        writes += _residuals(facts, config, writes)
    return PersistDecision(step=facts.step, writes=writes, must_wait=must_wait(facts, config))


def must_wait(facts: PolicyFacts, config: LayerCheckConfig) -> bool:
    """True when one more step would leave a layer older than `s_max`, counted against commits (I1).

    A layer without any committed version counts too: the first step waits for the commit of step 0, because a
    crash before it would leave nothing to go back to.
    """
    return any(
        layer.committed < 0 or facts.step + 1 - layer.committed > config.s_max for layer in facts.layers
    )


def full_anchor(facts: PolicyFacts, config: LayerCheckConfig) -> int:
    """Newest step <= `facts.step` for which the schedule wants a full event."""
    step, warmup = facts.step, config.warmup_steps
    if step < warmup:
        return step - step % config.warmup_full_every
    every = config.full_every
    if config.selection == "full":
        every = max(1, round(config.target_interval * facts.k_factor))
    return step - (step - warmup) % every if every else warmup


def threshold(layer: LayerFacts, facts: PolicyFacts, config: LayerCheckConfig) -> float | None:
    """K_l of a layer at the step of the facts, see `Scale.threshold`."""
    return facts.threshold(layer.name, layer.kind, layer.stagger, config)


def pressure(layer: LayerFacts, facts: PolicyFacts, config: LayerCheckConfig) -> float:
    """How due a layer is by the selection rule: due above 1, larger goes first."""
    if layer.overdue:
        return inf
    interval = config.target_interval * facts.k_factor
    if config.selection == "round_robin":
        return (_age(layer, facts.step) + 1) / (interval * layer.stagger)
    if config.selection == "random":
        draw = _draw(facts.step, layer.name)
        return 2.0 - draw if draw * interval < 1 else 0.0
    limit = threshold(layer, facts, config)
    if config.selection == "full" or limit is None:
        return 0.0
    return layer.drift / limit


# ----------------------------------------------------------------------------------------------------- events


def _full_event(facts: PolicyFacts, config: LayerCheckConfig) -> tuple[LayerWrite, ...]:
    """Every trainable layer; a frozen one only while it has no version (I11)."""
    frozen = tuple(
        LayerWrite(layer=name, reason="full", drift=0.0, threshold=0.0, age=0) for name in facts.frozen
    )
    trainable = tuple(
        LayerWrite(
            layer=layer.name,
            reason="full",
            drift=layer.drift,
            threshold=threshold(layer, facts, config) or 0.0,
            age=_age(layer, facts.step),
        )
        for layer in facts.layers
    )
    return trainable + frozen


def _selective_event(facts: PolicyFacts, config: LayerCheckConfig) -> tuple[LayerWrite, ...]:
    """First what the age limit forces, then what drifted most, up to `max_event_share` of the state."""
    room = config.max_event_share * sum(layer.numel for layer in facts.layers)
    chosen = _urgent(facts, config, room)
    used = sum(layer.numel for layer in chosen)
    for layer in _due(facts, config):
        if layer in chosen:
            continue
        if not chosen or used + layer.numel <= room:
            chosen.append(layer)
            used += layer.numel
    return tuple(_write(layer, facts, config) for layer in chosen)


def _due(facts: PolicyFacts, config: LayerCheckConfig) -> list[LayerFacts]:
    """Layers above their threshold, the largest D/K first (model order among equals).

    A layer whose earlier version is still in flight is left out: the copy under way covers most of its
    movement, and writing it again would only lengthen the queue of a storage that is already slower than the
    drift. Its D grows on and takes it to the front once the commit is seen; the age limit takes it anyway.
    """
    pressures = [(pressure(layer, facts, config), layer) for layer in facts.layers if not layer.in_flight]
    due = [(value, layer) for value, layer in pressures if value > 1]
    return [layer for _, layer in sorted(due, key=lambda pair: -pair[0])]


def _urgent(facts: PolicyFacts, config: LayerCheckConfig, room: float) -> list[LayerFacts]:
    """Layers that must go now, earliest deadline first.

    Packs all layers in the order of their deadlines into events of `room`, one a step from this step on. If
    putting everything off by one step would make any layer late, the part of the first event up to that layer
    goes now. A layer at its limit goes in any case, even if that makes the event larger than `room`.
    """
    limit = config.s_max - facts.margin
    order = sorted(facts.layers, key=lambda layer: layer.selected)
    slot, filled, first, late = 0, 0, 0, 0
    for position, layer in enumerate(order, start=1):
        if filled and filled + layer.numel > room:
            slot, filled = slot + 1, 0
        filled += layer.numel
        first = position if slot == 0 else first
        if layer.selected + limit <= facts.step + slot:
            late = position
    at_limit = sum(layer.selected + limit <= facts.step for layer in order)
    return order[: max(min(first, late), at_limit)]


def _residuals(
    facts: PolicyFacts, config: LayerCheckConfig, versions: tuple[LayerWrite, ...]
) -> tuple[LayerWrite, ...]:
    """Layers that moved by `k_ratio` of K since their newest save, the furthest first, in what room is left.

    They count by the bytes that the step copies, a third of a version's. After a full event and after a
    recovery the first ones are staggered like the versions, for the same reason.
    """
    if not config.residual.enabled:
        return ()
    due = []
    for layer in facts.layers:
        limit = _residual_threshold(layer, facts, config)
        if layer.residual is not None and limit is not None and layer.residual.drift > limit:
            due.append((layer.residual.drift / limit, layer, limit))
    chosen = {write.layer for write in versions}
    sizes = {layer.name: float(layer.numel) for layer in facts.layers}
    room = config.max_event_share * sum(sizes.values()) - sum(sizes[name] for name in chosen)
    writes: list[LayerWrite] = []
    for _, layer, limit in sorted(due, key=lambda item: -item[0]):
        cost = layer.numel * config.residual.staged_share
        if layer.name not in chosen and (cost <= room or not (versions or writes)):
            writes.append(_residual(layer, facts, limit))
            room -= cost
    return tuple(writes)


def _residual_threshold(layer: LayerFacts, facts: PolicyFacts, config: LayerCheckConfig) -> float | None:
    whole = threshold(layer, facts, config)
    if whole is None or layer.residual is None or not config.residual.covers(layer.name):
        return None
    of_version = layer.stagger if layer.residual.is_first else 1.0
    return config.residual.k_ratio * whole / layer.stagger * min(of_version, layer.residual.stagger)


def _residual(layer: LayerFacts, facts: PolicyFacts, limit: float) -> LayerWrite:
    assert layer.residual is not None
    return LayerWrite(
        layer=layer.name,
        reason="residual",
        drift=layer.residual.drift,
        threshold=limit,
        age=_age(layer, facts.step),
        base=layer.residual.base,
    )


def _write(layer: LayerFacts, facts: PolicyFacts, config: LayerCheckConfig) -> LayerWrite:
    """`drift` stands for the selection rule of whatever mode, `age` for the limit alone."""
    limit = threshold(layer, facts, config) or 0.0
    return LayerWrite(
        layer=layer.name,
        reason="drift" if pressure(layer, facts, config) > 1 else "age",
        drift=max(layer.drift, limit) if layer.overdue else layer.drift,
        threshold=limit,
        age=_age(layer, facts.step),
    )


def _age(layer: LayerFacts, step: int) -> int:
    return step - max(layer.selected, 0)


def _draw(step: int, layer: str) -> float:
    """A number in [0, 1) that depends on step and layer alone, hence equal on every rank and in a replay."""
    digest = hashlib.blake2b(f"{step}:{layer}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64
