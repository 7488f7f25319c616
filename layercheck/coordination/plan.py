"""The recovery plan: one version per layer and the first step to run. Pure; the simulation runs it too.

Numbers of a plan come from storage alone (I12), so anyone who reads the same store makes the same plan.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from layercheck.coordination import failures, in_memory, residuals
from layercheck.coordination.facts import SaveKey, State, StoreFacts, Version, by_layer, full_events
from layercheck.coordination.failures import Failure
from layercheck.coordination.lineage import ENDLESS, Lineage
from layercheck.coordination.lost import lost_drift, measure_of
from layercheck.errors import NoPlanError
from layercheck.layers import LayerSpec
from layercheck.manifest import (
    AttemptRecord,
    EventId,
    LayerPlan,
    PlanMode,
    PlannedSave,
    Progress,
    RecoveryPlan,
)

NO_WARMUP_STEPS = 200
"""Warm-up length of a store whose settings were not kept: the default of the configuration."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What is asked for.

    Attributes:
        world_size: ranks that will recover; None means as many as the newest attempt had.
        mode: `composite`, `uniform` (roll back to the newest full event), or `strict` (composite, refused
            where a layer is older than `strict_max_age`).
        max_age: refuse a plan with an older layer, whatever the mode.
        at_step: as if the run had failed at this step of the present lineage; of what an attempt did beyond
            a later roll-back nothing counts. Planned is the newest step up to it whose trainer state is kept.
        without: shard files to do without, paths below the store.
    """

    world_size: int | None = None
    mode: str = "composite"
    strict_max_age: int | None = None
    max_age: int | None = None
    at_step: int | None = None
    without: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Choice:
    """The chosen version of each layer. `state` is None for a composite, else what was rolled back to."""

    versions: dict[str, Version]
    state: State | None = None


def is_fresh(facts: StoreFacts, begun: AttemptRecord | None = None) -> bool:
    """True if nothing was ever trained: no commit that counts or may have counted, no heartbeat beyond 0.

    A commit of step 0 that a fenced predecessor finished too late is nothing to recover. Anything else that
    yields no plan is an error (I7). With `begun`: as that attempt found it.
    """
    lineage = Lineage(begun.lineage) if begun else facts.lineage
    own = begun.attempt if begun else ENDLESS
    return (
        not any(commit.event.attempt < own for commit in facts.live_commits(lineage))
        and not any(event.attempt < own for event in facts.damaged)
        and all(c.event.step == 0 for c in facts.commits if c.event.attempt < own)
        and all(p.step == 0 for attempt, p in facts.progress.items() if attempt < own)
        and all(link.r_b == 0 for link in lineage.links)
    )


def make_plan(
    facts: StoreFacts, request: PlanRequest, begun: AttemptRecord | None = None
) -> RecoveryPlan | None:
    """Plans the recovery that the next attempt would do, or that an attempt already begun has to do.

    Args:
        facts: what the store holds.
        request: what is asked for.
        begun: plan once more for this attempt: its own r_b and trainer state are fixed, its own commits and
            whatever a zombie added since do not count.

    Returns:
        The plan, or None if the store is fresh.

    Raises:
        NoPlanError: the store holds a run and yields no plan; names the layers.
    """
    if is_fresh(facts, begun):
        return None
    lineage = Lineage(begun.lineage) if begun else facts.lineage
    commits = [c for c in facts.live_commits(lineage) if begun is None or c.event.attempt < begun.attempt]
    versions = by_layer(commits, facts.run.stored)
    if request.at_step is not None:
        versions = _until(facts, versions, request.at_step)
    of_base = residuals.by_base(commits, ENDLESS if request.at_step is None else request.at_step)
    bad = facts.bad_saves | _without((*versions.values(), *of_base.values()), request.without)
    held = in_memory.live_events(facts, lineage)
    fixed = Failure(begun.r_b, "journal", begun.trainer_state) if begun else None
    failure = fixed or failures.newest(facts, lineage, held)
    if request.at_step is not None:
        failure = failures.up_to(facts, lineage, request.at_step, failure.step)
    mode, choice = _choose(facts, request, versions, bad)
    if choice.state is not None:
        of_base, held = {}, []  # the state of one step, as its event has it
        failure = failures.rolled_back_from(facts, begun, failure)
    resume = _resume_at(facts, choice, failure)
    before = Lineage(begun.lineage[:-1]) if begun else lineage  # losses are those of the attempt that failed
    beat = facts.progress.get(before.attempt)
    saved = {name: residuals.newest(one, of_base, bad) or one for name, one in choice.versions.items()}
    newer = in_memory.newer_versions(facts, held, saved, failure.step)
    after = _After(bad, of_base, before, failure.step, beat, newer)
    layers = tuple(
        _layer_plan(spec, choice.versions[spec.name], versions[spec.name], after)
        for spec in facts.run.stored.layers
    )
    _check_age(layers, "max_age", request.max_age)
    if mode == "strict":
        _check_age(layers, "strict_max_age", request.strict_max_age or 0)
    return RecoveryPlan(
        mode=mode,
        world_size=request.world_size or (facts.newest.world_size if facts.newest else 1),
        t_fail=failure.step,
        t_fail_source=failure.source,
        resume_step=resume.step + 1,
        trainer_state=resume.trainer_state,
        drift=carried_drift(facts, lineage, choice.versions, resume.step),
        layers=layers,
        measure=measure_of(beat, failure.step, layers),
    )


# ---------------------------------------------------------------- which versions


def _resume_at(facts: StoreFacts, choice: _Choice, failure: Failure) -> Failure:
    """The last step that counts as done, with the trainer state that belongs to it."""
    if choice.state is None:
        return failure
    step, attempt = choice.state
    states = [c.trainer_state for c in facts.commits if (c.event.step, c.event.attempt) == choice.state]
    assert states, f"event of step {step}, attempt {attempt} has no commit"
    return Failure(step, "commit", states[0])


def _choose(
    facts: StoreFacts,
    request: PlanRequest,
    versions: dict[str, list[Version]],
    bad: frozenset[SaveKey],
) -> tuple[PlanMode, _Choice]:
    if not _has_base(facts, versions):
        return "warmup_rollback", _newest_full(facts, versions, bad)
    if request.mode == "uniform":
        return "uniform", _newest_full(facts, versions, bad)
    return "strict" if request.mode == "strict" else "composite", _newest_each(facts, versions, bad)


def _has_base(facts: StoreFacts, versions: dict[str, list[Version]]) -> bool:
    """True once every trainable layer has a version from the end of the warm-up or later.

    The base is the full event that does so; a damaged base is still a base, hence no look at `bad`, and where
    its commit is damaged the later versions of all layers stand for it.
    """
    warmup = facts.run.config.get("checkpoint", {}).get("warmup_steps", NO_WARMUP_STEPS)
    return all(
        versions[layer.name] and versions[layer.name][0].event.step >= warmup
        for layer in facts.run.layer_map.trainable
    )


def _newest_each(facts: StoreFacts, versions: dict[str, list[Version]], bad: frozenset[SaveKey]) -> _Choice:
    chosen = {name: next((v for v in all_of if v.key not in bad), None) for name, all_of in versions.items()}
    missing = [name for name, version in chosen.items() if version is None]
    if missing:
        raise _no_plan(facts, missing, versions)
    return _Choice({name: version for name, version in chosen.items() if version is not None})


def _newest_full(facts: StoreFacts, versions: dict[str, list[Version]], bad: frozenset[SaveKey]) -> _Choice:
    """All trainable layers from one full event; frozen ones from their newest version, whatever its step."""
    layer_map = facts.run.stored
    full = full_events(versions, layer_map, bad)
    usable = {name: [v for v in all_of if v.key not in bad] for name, all_of in versions.items()}
    if not full:
        lacking = [layer.name for layer in layer_map.trainable if not usable[layer.name]]
        raise _no_plan(facts, lacking or [layer.name for layer in layer_map.trainable], versions)
    chosen: dict[str, Version] = {}
    for layer in layer_map.layers:
        wanted = [v for v in usable[layer.name] if not layer.trainable or v.state == full[0]]
        if not wanted:
            raise _no_plan(facts, [layer.name], versions)
        chosen[layer.name] = wanted[0]
    return _Choice(chosen, full[0])


def _no_plan(facts: StoreFacts, layers: list[str], versions: dict[str, list[Version]]) -> NoPlanError:
    shown = ", ".join(layers[:5]) + (f" and {len(layers) - 5} more" if len(layers) > 5 else "")
    seen = sum(len(versions[name]) for name in layers)
    return NoPlanError(
        f"run {facts.run.name} holds {len(facts.commits)} commits ({len(facts.damaged)} more damaged) but no "
        f"usable version of {shown} ({seen} are damaged or not in one full event): repair the store, "
        "or start under another run name; nothing was changed",
        run=facts.run.name,
        layers=tuple(layers),
    )


def _until(facts: StoreFacts, versions: dict[str, list[Version]], at_step: int) -> dict[str, list[Version]]:
    kept = {name: [v for v in all_of if v.event.step <= at_step] for name, all_of in versions.items()}
    gone = [name for name, all_of in kept.items() if versions[name] and not all_of]
    if gone:
        oldest = min(version.event.step for version in versions[gone[0]])
        raise NoPlanError(
            f"run {facts.run.name} keeps no version of {gone[0]} up to step {at_step}, its oldest is of step "
            f"{oldest}: use a later --at-step (keep_versions decides how many are kept)",
            run=facts.run.name,
            layers=tuple(gone),
        )
    return kept


def _without(saves: Iterable[list[Version]], files: frozenset[str]) -> frozenset[SaveKey]:
    return frozenset(
        version.key
        for all_of in saves
        for version in all_of
        if any(shard.file in files for shard in version.shards)
    )


# ---------------------------------------------------------------- what it says of each layer


@dataclass(frozen=True, slots=True)
class _After:
    """What else says what of a layer comes back."""

    bad: frozenset[SaveKey]
    of_base: dict[residuals.BaseKey, list[Version]]
    lineage: Lineage
    t_fail: int
    beat: Progress | None
    in_memory: dict[str, PlannedSave]


def _layer_plan(spec: LayerSpec, version: Version, versions: list[Version], after: _After) -> LayerPlan:
    residual = residuals.newest(version, after.of_base, after.bad)
    newer = after.in_memory.get(spec.name)
    saved = newer or (residual or version).event
    lost = lost_steps(after.lineage, saved, after.t_fail) if spec.trainable else 0
    is_newer_bad = any(other.key in after.bad and other.order > version.order for other in versions)
    return LayerPlan(
        layer=spec.name,
        numel=spec.numel,
        step=version.event.step,
        attempt=version.event.attempt,
        age=max(0, after.t_fail - (newer or version.event).step),
        lost=lost,
        lost_drift=lost_drift(after.beat, spec.name, saved.step, lost),
        reason=version.shards[0].reason,
        shards=tuple(version.shards),
        fallback=is_newer_bad or residuals.has_newer_bad(version, after.of_base, after.bad),
        trainable=spec.trainable,
        residual=residuals.planned(residual),
        memory=newer,
    )


def lost_steps(lineage: Lineage, saved: EventId | PlannedSave, t_fail: int) -> int:
    """Steps applied to a layer in this lineage since its save: t_fail - max(t_l, later r_b)."""
    since = max(saved.step, lineage.last_restart(saved.attempt, t_fail))
    return max(0, t_fail - since)


def _check_age(layers: tuple[LayerPlan, ...], knob: str, limit: int | None) -> None:
    old = [layer for layer in layers if layer.trainable and limit is not None and layer.age > limit]
    if old:
        named = ", ".join(f"{layer.layer} ({layer.age} steps)" for layer in old)
        raise NoPlanError(
            f"older than {knob}={limit}: {named}; raise {knob}, or recover with mode composite or uniform",
            layers=tuple(layer.layer for layer in old),
            max_age=limit,
        )


def carried_drift(
    facts: StoreFacts, lineage: Lineage, chosen: dict[str, Version], done: int
) -> dict[str, float]:
    """D of each trainable layer at step `done`, as far as the journal knows it; infinity means due.

    The journaled D counts from the newest version that was *selected*. If that one never became live, the
    layer is older than its D says and counts as due; so does a layer of which nothing is journaled.
    """
    journal = None
    for link in reversed(lineage.links):
        journal = facts.progress.get(link.attempt)
        if journal is not None:
            if journal.step > min(lineage.rolled_back_to(link.attempt), done):
                journal = None  # measured on steps that have been undone since
            break
    selected = (journal.trainer_state.get("layercheck") or {}).get("selected", {}) if journal else {}
    drift = {}
    for layer in facts.run.layer_map.trainable:
        step = chosen[layer.name].event.step
        if step >= done or (journal is not None and step > journal.step):
            drift[layer.name] = 0.0
        elif journal is None or selected.get(layer.name, step) > step:
            drift[layer.name] = math.inf
        else:
            drift[layer.name] = journal.drift.get(layer.name, math.inf)
    return drift
