"""What is validated: a method, how the run is configured for it, and where its commits fall."""

from dataclasses import dataclass

from app.measure.failing import SETTLE_STEPS

NEVER = 10**9
"""Steps between two commits of a run that has none."""
CONFIG = "validation"
_WARMUP_STEPS = 10
_MANUAL = {"checkfreq": ("checkpoint.baseline.checkfreq.mode=manual",)}
"""Settings that make a method keep to its interval."""


@dataclass(frozen=True, slots=True)
class Arm:
    """One method at one operating point.

    Attributes:
        settings: `--set` items for app/configs/validation.yaml.
        interval_steps: steps from commit to commit.
        begin_step: a step that ends with a commit, after an earlier one is durable for sure.
    """

    name: str
    settings: tuple[str, ...]
    interval_steps: int
    begin_step: int

    @property
    def steps_between_kills(self) -> int:
        """Steps after which a run is beyond where it was killed, for the calibration."""
        return 0 if self.interval_steps == NEVER else self.interval_steps + SETTLE_STEPS


def arm_of(name: str, interval_steps: int) -> Arm:
    """The arm of a name: `layercheck`, `layercheck_uniform`, or any `checkpoint.method` of the app.

    `layercheck_uniform` is LayerCheck's fall-back as a method of its own: after a failure all layers go back
    to the newest full event, of which there is one every `interval_steps`.
    """
    if name == "layercheck":
        return Arm(name, (), 1, 2 * _WARMUP_STEPS)
    if name == "none":
        return Arm(name, ("checkpoint.method=none",), NEVER, 0)
    if name == "layercheck_uniform":
        settings = {"recovery": "uniform", "full_every": interval_steps}
        pairs = tuple(f"checkpoint.settings.{key}={value}" for key, value in settings.items())
        # Full events come so many steps after the end of the warm-up.
        return Arm(name, pairs, interval_steps, _WARMUP_STEPS + 2 * interval_steps)
    pairs = (
        f"checkpoint.method={name}",
        f"checkpoint.baseline.{name}.interval_steps={interval_steps}",
        *_MANUAL.get(name, ()),
    )
    return Arm(name, pairs, interval_steps, 2 * interval_steps)
