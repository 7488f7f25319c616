"""The conditions of the killed runs: model and text of the fidelity experiments, another learning rate."""

from pathlib import Path

from app.config import Config, parse
from app.measure.fidelity.regime import base_config, tuning_config
from app.measure.fidelity.texts import Texts, write_texts
from app.measure.residuals.spec import KilledRun


def run_config(folder: Path, run: KilledRun) -> Config:
    """The configuration of a run.

    The learning rate falls to its half: a decay to nothing would end the movement that is measured.

    Args:
        folder: of all runs; `prepare` was called for it.
        run: what is asked for.
    """
    place = folder / "texts"
    texts = Texts(*(place / f"{name}.jsonl" for name in ("train", "held-out", "choices")))
    settings = tuning_config(folder, base_folder(folder, run), texts, run.tuning).resolved()
    settings["run"]["name"] = run.name
    settings["train"] |= {"schedule": "linear", "min_lr_ratio": 0.5}
    return parse(settings, "residuals")


def prepare(folder: Path, run: KilledRun) -> None:
    """Writes the texts of all runs; before they begin, since they read them at the same time."""
    length = run.tuning.length
    (folder / "texts").mkdir(exist_ok=True)
    write_texts(folder / "texts", length.train_rows, length.held_out_rows)


def base_folder(folder: Path, run: KilledRun) -> Path:
    """Where `base_model` puts the model that is fine-tuned."""
    spec = run.tuning
    return Path(f"{base_config(folder, spec.model, spec.length).run.folder}-hf")
