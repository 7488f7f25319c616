"""The trained model as a folder that `from_pretrained` reads, gathered from all ranks at the end of a run."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from app.step import Job

MARK = "exported.json"
"""In the folder of a run whose model was handed over."""


@contextmanager
def exported(job: Job) -> Iterator[Path | None]:
    """A temporary folder with weights (adapters of a LoRA run), config and tokenizer; None beside rank 0.

    A collective. Rank 0 holds the model once in host memory, in the dtype of the forward pass; `layercheck
    export` gives the fp32 masters, layer by layer.
    """
    lora = job.config.model.lora is not None
    state = job.engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=lora)
    if state is None:
        yield None
        return
    with tempfile.TemporaryDirectory(prefix="layercheck-model-") as folder:
        _save(job.engine.module, state, Path(folder))
        job.dataset.tokenizer.save_pretrained(folder)
        yield Path(folder)


def _save(module: Any, state: dict[str, Any], folder: Path) -> None:
    module.config.use_cache = True  # switched off for training alone
    try:
        module.save_pretrained(folder, state_dict=state)
    finally:
        module.config.use_cache = False
