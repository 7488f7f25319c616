"""A killed run that fine-tunes: its configuration as a file for the app, and how good the model ends."""

from pathlib import Path

import yaml

from app.config import parse
from app.measure.fidelity.spec import RunSpec
from app.measure.fine_tuned import base_folder, make_base, settings_of, texts_of
from app.measure.memory.places import NUM_WORKERS

_LIMIT_S = 900.0


def prepared(folder: Path, spec: RunSpec) -> str:
    """Makes what the run begins with, unless it is there, and its configuration; returns the file of that.

    Args:
        folder: of the run, in that of all runs.
        spec: of the run.
    """
    make_base(folder.parent, spec)
    settings = settings_of(folder.parent, spec)
    settings["train"]["micro_batch"] = settings["train"]["global_batch"] // NUM_WORKERS
    settings["cluster"]["workers"] = NUM_WORKERS
    path = folder / "config.yaml"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(yaml.safe_dump(settings))
    return str(path)


def held_out(folder: Path, store: Path, spec: RunSpec) -> tuple[float, float]:
    """Mean loss of the answer tokens of rows that were never seen: of the base, and of what the run left.

    Args:
        folder: of all runs.
        store: the run folder, whose last event is whole.
        spec: of the run.

    Raises:
        LayerCheckError: the model cannot be read, or it took too long.
    """
    from app.measure.ranks import run_on_ranks  # loads torch, which is left to another process

    ((before, after),) = run_on_ranks(1, _LIMIT_S, _losses_on_rank, str(folder), str(store), spec)
    return before, after


def _losses_on_rank(rank: int, folder: str, store: str, spec: RunSpec) -> tuple[float, float]:
    import torch
    from transformers import AutoModelForCausalLM

    from app.measure.fidelity.held_out import HeldOut
    from layercheck.commands.export import ExportOptions, export
    from layercheck.commands.store import open_both

    tuned = f"{store}-hf"
    export(open_both(store), ExportOptions(to="hf", out=tuned))
    config = parse(settings_of(Path(folder), spec), "fine-tuning")
    rows = HeldOut(config, texts_of(Path(folder)))
    kind = {"dtype": torch.float32, "attn_implementation": config.model.attention, "local_files_only": True}
    base = str(base_folder(Path(folder), spec))
    before, after = (
        rows.loss(AutoModelForCausalLM.from_pretrained(model, **kind)) for model in (base, tuned)
    )
    return before, after
