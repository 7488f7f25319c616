"""The model that is fine-tuned: trained from scratch by this app, exported as any run is."""

from pathlib import Path

from app.measure.fidelity.regime import base_config
from app.measure.fidelity.spec import Length, ModelKind
from app.train_loop import train
from layercheck.commands.export import ExportOptions, export
from layercheck.commands.store import open_both


def base_model(folder: Path, model: ModelKind, length: Length) -> Path:
    """A folder that `from_pretrained` reads; made if it is not there. Called on every rank."""
    config = base_config(folder, model, length)
    out = Path(f"{config.run.folder}-hf")
    if not out.is_dir():
        train(config, rank=0, world_size=1)
        export(open_both(config.run.folder), ExportOptions(to="hf", out=str(out)))
    return out
