"""The conditions of the killed runs: model and text of the fidelity experiments, another learning rate."""

from pathlib import Path

from app.config import Config, parse
from app.measure.fine_tuned import settings_of
from app.measure.residuals.spec import KilledRun


def run_config(folder: Path, run: KilledRun) -> Config:
    """The configuration of a run.

    The learning rate falls to its half: a decay to nothing would end the movement that is measured.

    Args:
        folder: of all runs; `make_base` was called for it.
        run: what is asked for.
    """
    settings = settings_of(folder, run.tuning)
    settings["run"]["name"] = run.name
    settings["train"] |= {"schedule": "linear", "min_lr_ratio": 0.5}
    return parse(settings, "residuals")
