"""[pure] What must hold of the runs without failures before anything is compared."""

from collections.abc import Mapping, Sequence

from app.measure.fidelity.spec import Outcome
from layercheck.errors import LayerCheckError
from simulations.fidelity.experiments import Arm

MOST_UNEQUAL = 0.10
"""Bytes that an arm may write more or less than the one it is to equal, relative."""


def check_alike(name: str, scout: Outcome, free: Outcome) -> None:
    """A session changes nothing: whatever the settings, a seed without failures is one training.

    Raises:
        LayerCheckError: an evaluation differs in any bit.
    """
    pairs = zip(scout.evaluations, free.evaluations, strict=True)
    for (step, found), (_, expected) in pairs:
        if found != expected:
            raise LayerCheckError(
                f"arm {name!r}, seed {scout.spec.seed}: without failures the held-out loss of step {step} is "
                f"{found!r} and not {expected!r} as under other settings: saving has changed the training, "
                f"or --runs holds runs of several machines ({scout.spec.key}, {free.spec.key})",
                step=step,
            )


def byte_ratios(arms: Sequence[Arm], scouts: Mapping[str, Outcome]) -> dict[str, float]:
    """Bytes that each arm wrote / those of the arm it is to equal; only of arms that are to equal one."""
    return {
        arm.name: scouts[arm.name].bytes_written / scouts[arm.equal_bytes_to].bytes_written
        for arm in arms
        if arm.equal_bytes_to is not None
    }


def are_equal(ratios: Mapping[str, float]) -> bool:
    """Whether all are as near to 1 as `MOST_UNEQUAL` says."""
    return all(abs(ratio - 1) <= MOST_UNEQUAL for ratio in ratios.values())


def check_equal(ratios: Mapping[str, float]) -> None:
    """Refuses what could not be made equal.

    Raises:
        LayerCheckError: an arm writes more or less than `MOST_UNEQUAL` allows; names the worst.
    """
    if are_equal(ratios):
        return
    name, worst = max(ratios.items(), key=lambda item: abs(item[1] - 1))
    raise LayerCheckError(
        f"arm {name!r} writes {worst:.3f} of the bytes of the arm that it is to equal; allowed "
        f"is {1 - MOST_UNEQUAL:g} to {1 + MOST_UNEQUAL:g}: longer runs can be set more finely (no --quick)",
        ratio=worst,
    )
