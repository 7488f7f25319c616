"""The conditions of the killed runs: model and text of the fidelity experiments, another learning rate."""

from pathlib import Path

from app.config import Config, parse
from app.measure.fidelity.regime import base_config, tuning_config
from app.measure.fidelity.texts import write_texts
from app.measure.residuals.spec import KilledRun


def run_config(folder: Path, run: KilledRun) -> Config:
    """The configuration of a run; writes its texts.

    The learning rate falls to its half: a decay to nothing would end the movement that is measured.

    Args:
        folder: of all runs; holds the model that is fine-tuned.
        run: what is asked for.
    """
    length = run.tuning.length
    place = folder / "texts"
    place.mkdir(exist_ok=True)
    texts = write_texts(place, length.train_rows, length.held_out_rows)
    settings = tuning_config(folder, base_folder(folder, run), texts, run.tuning).resolved()
    settings["run"]["name"] = run.name
    settings["train"] |= {"schedule": "linear", "min_lr_ratio": 0.5}
    return parse(settings, "residuals")


def base_folder(folder: Path, run: KilledRun) -> Path:
    """Where `base_model` puts the model that is fine-tuned."""
    spec = run.tuning
    return Path(f"{base_config(folder, spec.model, spec.length).run.folder}-hf")
