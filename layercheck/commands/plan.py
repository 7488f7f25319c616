"""`layercheck plan`: a dry run of the next recovery, also of one that did not happen."""

from dataclasses import dataclass
from typing import Any

from layercheck.commands.answer import NOT_THE_NEWEST, Answer, number, size, table
from layercheck.commands.store import Store
from layercheck.coordination import restarts
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.errors import ConfigError, NoPlanError
from layercheck.lost import in_words
from layercheck.manifest import RecoveryPlan


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """The flags. `mode` None is what the next attempt would use; `without`: shard files or event folders."""

    mode: str | None = None
    at_step: int | None = None
    max_age: int | None = None
    without: tuple[str, ...] = ()
    world_size: int | None = None


def plan(store: Store, options: PlanOptions) -> Answer:
    """Plans and changes nothing.

    Raises:
        NoPlanError: the store holds a run and yields no plan, or holds none of a step yet.
        ConfigError: `without` names no shard, or `strict` has no limit.
    """
    facts = store.facts()
    made = planned(facts, options)
    return Answer(_value(made), _text(facts, made), notes=facts.notes + notes_of(made, options))


def planned(facts: StoreFacts, options: PlanOptions) -> RecoveryPlan:
    """The plan that the options ask for. Raises as `plan` does."""
    made = make_plan(facts, _request(facts, options))
    if made is None:
        raise NoPlanError(f"run {facts.run.name} holds no step yet: the next attempt starts at step 1")
    return made


def notes_of(made: RecoveryPlan, options: PlanOptions) -> tuple[str, ...]:
    """What a person should know of a plan beside the plan."""
    if options.at_step is None or made.t_fail == options.at_step:
        return ()
    return (f"no trainer state of step {options.at_step} is kept: this is the plan of step {made.t_fail}",)


def _request(facts: StoreFacts, options: PlanOptions) -> PlanRequest:
    settings = facts.run.config.get("checkpoint", {})
    mode = options.mode or restarts.mode_after_poison(facts, settings.get("recovery", "composite"))
    strict_max_age, max_age = settings.get("strict_max_age"), options.max_age
    if options.mode == "strict" and max_age is not None:
        strict_max_age, max_age = max_age, None
    if mode == "strict" and strict_max_age is None:
        raise ConfigError("--mode strict: this run has no strict_max_age; give --max-age N beside it")
    return PlanRequest(
        world_size=options.world_size,
        mode=mode,
        strict_max_age=strict_max_age,
        max_age=max_age,
        at_step=options.at_step,
        without=_files(facts, options.without),
    )


def _files(facts: StoreFacts, named: tuple[str, ...]) -> frozenset[str]:
    """The shard files that were named, each by its path below the store, its folder, or a longer path."""
    known = {row.file for commit in facts.commits for row in commit.records}
    chosen: set[str] = set()
    for name in named:
        _, _, short = name.replace("\\", "/").rstrip("/").rpartition("events/")
        found = {file for file in known if file == f"events/{short}" or file.startswith(f"events/{short}/")}
        if not short or not found:
            raise ConfigError(f"--without {name}: no committed shard of this store has that name", file=name)
        chosen |= found
    return frozenset(chosen)


def _value(made: RecoveryPlan) -> dict[str, Any]:
    return {
        "mode": made.mode,
        "t_fail": made.t_fail,
        "t_fail_source": made.t_fail_source,
        "resume_step": made.resume_step,
        "world_size": made.world_size,
        "max_age": made.max_age,
        "weighted_age": made.weighted_age,
        "lost_steps": made.lost_steps,
        "lost_drift": made.lost_drift,
        "measure": made.measure,
        "nbytes": made.nbytes,
        "layers": [
            layer.row
            | {
                "nbytes": layer.nbytes,
                "files": sorted({shard.file for shard in layer.all_shards}),
                "fallback": layer.fallback,
            }
            for layer in made.layers
        ],
    }


def _text(facts: StoreFacts, made: RecoveryPlan) -> str:
    head = (
        f"run {facts.run.name}: {made.mode} recovery on {made.world_size} ranks, resumes at step "
        f"{made.resume_step} (t_fail {made.t_fail}, from {made.t_fail_source})\n"
        f"{size(made.nbytes)} to read; oldest layer {made.max_age} steps, size-weighted age "
        f"{number(made.weighted_age)}, lost steps {number(made.lost_steps)}, "
        f"lost movement {in_words(made.lost_drift, made.measure, made.has_residuals)}\n"
    )
    rows = [
        (
            layer.layer,
            str(layer.step),
            str(layer.attempt),
            str(layer.age),
            str(layer.residual.step) if layer.residual else "-",
            str(layer.lost),
            number(layer.lost_drift),
            size(layer.nbytes),
            layer.reason,
            NOT_THE_NEWEST if layer.fallback else "",
        )
        for layer in made.layers
    ]
    return (
        head
        + "\n"
        + table(
            ("layer", "step", "attempt", "age", "residual", "lost", "lost drift", "size", "reason", ""), rows
        )
    )
