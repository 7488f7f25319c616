"""Runs an experiment and writes its results; a run that is known already is not made again."""

import json
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from app.measure.fidelity.spec import Length, ModelKind, Outcome, RunSpec
from layercheck.errors import ConfigError
from simulations.fidelity.checks import are_equal, byte_ratios, check_alike, check_equal
from simulations.fidelity.experiments import ARMS, CHECKPOINT, Arm, equalised, failures_of
from simulations.fidelity.figures import arm_figures, is_worse, reference_of, verdicts
from simulations.fidelity.heatmap import HEATMAP, draw_heatmap
from simulations.fidelity.pictures import draw
from simulations.fidelity.result import markdown

LEAST_SEEDS = 2
FIRST_SEED = 0
"""That of the scouts, whose steps are those of all seeds."""
_TRIES = 3
EXPERIMENTS = (HEATMAP, *ARMS)
_LIMIT_S = 4 * 3600.0
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Order:
    """What was asked for.

    Attributes:
        runs: folder of the outcomes; experiments share the runs that they have in common.
    """

    experiment: str
    out: Path
    runs: Path
    seeds: int
    length: Length
    pictures: bool = True


def run_experiment(order: Order, say: Say) -> dict[str, Any]:
    """Makes the runs that are missing, writes `fidelity.json`, tables and pictures; returns the content.

    Raises:
        ConfigError: too few seeds, or a folder that cannot be made.
    """
    if order.seeds < LEAST_SEEDS:
        raise ConfigError(f"seeds={order.seeds}: at least {LEAST_SEEDS} are needed, for a spread")
    for folder in (order.out, order.runs):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the folder {folder}: {error.strerror}", path=str(folder)
            ) from None
    lab = Lab(order.runs, say)
    if order.experiment == HEATMAP:
        content = draw_heatmap(lab, order.out, order.length, order.pictures)
    else:
        content, curves = compare(lab, order)
        (order.out / "fidelity.md").write_text(markdown(content))
        if order.pictures:
            draw(content, curves, order.out)
    content["conditions"] |= {
        "machine": platform.platform(),
        "cores": len(os.sched_getaffinity(0)),
    }
    (order.out / "fidelity.json").write_text(json.dumps(content, indent=2) + "\n")
    return content


class Lab:
    """Outcomes by spec: from the folder, or from runs made now, all in one process of their own."""

    def __init__(self, folder: Path, say: Say) -> None:
        self.folder = folder.absolute()
        self._say = say

    def run(self, specs: Sequence[RunSpec], keep: bool = False) -> list[Outcome]:
        """The outcomes, in the order of the specs."""
        missing = {spec.key: spec for spec in specs if not self._file(spec).exists()}
        if missing:
            from app.measure.fidelity.tuning import run_specs  # loads torch, which figures need not
            from app.measure.ranks import run_on_ranks

            self._say(f"{len(missing)} runs to make, of {len({spec.key for spec in specs})}")
            run_on_ranks(1, _LIMIT_S, run_specs, str(self.folder), list(missing.values()), keep)
        return [Outcome.model_validate_json(self._file(spec).read_text()) for spec in specs]

    def _file(self, spec: RunSpec) -> Path:
        return self.folder / f"{spec.key}.json"


Curves = dict[str, list[Outcome]]
Training = tuple[ModelKind, float]
"""See `Arm.training`."""


def compare(lab: Lab, order: Order) -> tuple[dict[str, Any], Curves]:
    """Runs all arms beside those that never fail; the content of `fidelity.json`, and all outcomes.

    Raises:
        LayerCheckError: the runs cannot be compared: without failures they are not one training, or they do
            not write equal bytes where that is asked for.
    """
    length, seeds = order.length, range(FIRST_SEED, FIRST_SEED + order.seeds)
    arms = ARMS[order.experiment]
    trainings = {arm.training: arm for arm in arms}
    specs = [
        Arm("free", model=one.model, lr_decay=one.lr_decay).spec(seed, length, ())
        for one in trainings.values()
        for seed in seeds
    ]
    lab.run([*specs, *(arm.spec(FIRST_SEED, length, ()) for arm in arms)])  # one group of processes for all
    unharmed = iter(lab.run(specs))
    free = {training: [next(unharmed) for _ in seeds] for training in trainings}
    arms, scouts, ratios = _equal(lab, arms, length, free)
    # Seed by seed: what was broken off still has all arms of the first seeds.
    failing = [
        arm.spec(seed, length, failures_of(arm, scouts[arm.name], seed)) for seed in seeds for arm in arms
    ]
    outcomes = lab.run(failing)
    recovered = {arm.name: outcomes[place :: len(arms)] for place, arm in enumerate(arms)}
    content = _content(order, arms, recovered, [free[arm.training] for arm in arms])
    content["scouts_train_bit_for_bit_alike"] = True  # else an error, above
    content["byte_ratios"] = ratios
    return content, {"without failures": free[arms[0].training], **recovered}


def _equal(
    lab: Lab, arms: tuple[Arm, ...], length: Length, free: Mapping[Training, list[Outcome]]
) -> tuple[tuple[Arm, ...], dict[str, Outcome], dict[str, float]]:
    """The arms that write equal bytes where they should, their scouts, and how equal these are.

    Bytes are not quite proportional to an interval: what they come to is measured, and may need another try.
    """
    arms = equalised(arms, _scouts(lab, arms, length, free))
    for _ in range(_TRIES):
        found = _scouts(lab, arms, length, free)
        ratios = byte_ratios(arms, found)
        if are_equal(ratios):
            break
        arms = equalised(arms, found)
    check_equal(ratios)
    return arms, found, ratios


def _scouts(
    lab: Lab, arms: Sequence[Arm], length: Length, free: Mapping[Training, list[Outcome]]
) -> dict[str, Outcome]:
    outcomes = lab.run([arm.spec(FIRST_SEED, length, ()) for arm in arms])
    for arm, scout in zip(arms, outcomes, strict=True):
        check_alike(arm.name, scout, free[arm.training][0])
    return {arm.name: scout for arm, scout in zip(arms, outcomes, strict=True)}


def _content(
    order: Order, arms: Sequence[Arm], recovered: Curves, free: Sequence[list[Outcome]]
) -> dict[str, Any]:
    figures = {
        arm.name: arm_figures(recovered[arm.name], beside) for arm, beside in zip(arms, free, strict=True)
    }
    references = {arm.name: asdict(reference_of(beside)) for arm, beside in zip(arms, free, strict=True)}
    main, reference = figures[arms[0].name], reference_of(free[0])
    return {
        "experiment": order.experiment,
        "arm": arms[0].name,
        "final_loss_deviation": list(main.final_loss_deviation),
        "fraction_of_improvement_lost": main.fraction_of_improvement_lost,
        "seed_spread": reference.seed_spread,
        "lost_steps": list(main.lost_steps),
        "verdicts": verdicts(reference, main),
        "worse_than_the_first_arm": {
            name: is_worse(one, main)
            for arm, (name, one) in zip(arms, figures.items(), strict=True)
            if name != arms[0].name and arm.training == arms[0].training
        },
        "arms": {name: asdict(one) for name, one in figures.items()},
        "references": references,
        "conditions": {
            "seeds": order.seeds,
            "failures_chosen_on_seed": FIRST_SEED,
            "length": order.length.model_dump(),
            "checkpoint": CHECKPOINT,
            "settings": {arm.name: _setting(arm) for arm in arms},
            "parameters": {arm.name: recovered[arm.name][0].num_parameters for arm in arms},
            "step_s": free[0][0].step_s,
        },
    }


def _setting(arm: Arm) -> dict[str, Any]:
    changed = {key: value for key, value in arm.checkpoint.items() if CHECKPOINT.get(key) != value}
    return {
        "model": arm.model,
        "lr_decay": arm.lr_decay,
        "failures": arm.when,
        "first moment": arm.moment,
        "changed": changed,
    }
