"""What the killed runs fine-tune: model and texts of the fidelity experiments, made once for all runs."""

from pathlib import Path
from typing import Any

from app.measure.fidelity.regime import base_config, tuning_config
from app.measure.fidelity.spec import RunSpec
from app.measure.fidelity.texts import Texts, write_texts

_LIMIT_S = 3 * 3600.0


def make_base(folder: Path, spec: RunSpec) -> None:
    """Writes the texts, which runs read at the same time; trains the model, unless it is there.

    Args:
        folder: of all runs.
        spec: of one of them; its model and its length matter.
    """
    make_texts(folder, spec)
    if not base_folder(folder, spec).is_dir():
        from app.measure.ranks import run_on_ranks  # loads torch, which a coordinator need not

        run_on_ranks(1, _LIMIT_S, _base_on_rank, str(folder.absolute()), spec)


def _base_on_rank(rank: int, folder: str, spec: RunSpec) -> None:
    from app.measure.fidelity.base import base_model

    base_model(Path(folder), spec.model, spec.length)


def make_texts(folder: Path, spec: RunSpec) -> None:
    """Writes the texts of all runs."""
    place = texts_of(folder).train.parent
    place.mkdir(exist_ok=True)
    write_texts(place, spec.length.train_rows, spec.length.held_out_rows)


def texts_of(folder: Path) -> Texts:
    """Where `make_texts` puts them."""
    place = folder.absolute() / "texts"
    return Texts(*(place / f"{name}.jsonl" for name in ("train", "held-out", "choices")))


def base_folder(folder: Path, spec: RunSpec) -> Path:
    """Where `make_base` puts the model that is fine-tuned."""
    return Path(f"{base_config(folder.absolute(), spec.model, spec.length).run.folder}-hf")


def settings_of(folder: Path, spec: RunSpec) -> dict[str, Any]:
    """Every setting of a run of the app that fine-tunes it, on one rank."""
    folder = folder.absolute()
    return tuning_config(folder, base_folder(folder, spec), texts_of(folder), spec).resolved()
