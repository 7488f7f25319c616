"""A folder that `from_pretrained` reads: config, tokenizer files, weights as safetensors.

The weights are the fp32 masters, or their rounded copy. A shared weight is written once, under the name of
its owner; the loader ties it again. Layers pass through one at a time: no more than one is held.
"""

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from layercheck.errors import ConfigError
from layercheck.export.composite import Composite
from layercheck.layers import ParamSpec
from layercheck.persistence.elements import TORCH_DTYPES, elements
from layercheck.persistence.shard_file import DTYPE_BYTES, MASTER
from layercheck.recovery.fetch import FetchedSlice
from layercheck.recovery.scatter import Array
from layercheck.zero3 import FROZEN

MAX_FILE_BYTES = 5_000_000_000
"""A larger model is split over several files, as `save_pretrained` does."""
DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_CASTABLE = ("F64", "F32", "F16", "BF16")
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_PEFT = "base_model.model."


@dataclass(frozen=True, slots=True)
class _File:
    """One safetensors file and its parameters, in order."""

    name: str
    params: tuple[ParamSpec, ...]


def write_hf(
    composite: Composite, folder: Path, dtype: str = "float32", max_file_bytes: int = MAX_FILE_BYTES
) -> tuple[str, ...]:
    """Writes the model of a composite.

    Args:
        composite: what to write.
        folder: an empty folder.
        dtype: `float32`, `bfloat16` or `float16`.
        max_file_bytes: largest safetensors file; a parameter is never split.

    Returns:
        What a person should know of it.

    Raises:
        ConfigError: the run's model is no Hugging Face model, or one of adapters.
        BadShardError: see `Composite.layers`; the folder is then of no use.
    """
    _refuse_foreign(composite)
    files = _split(composite, DTYPE_BYTES[DTYPES[dtype]], max_file_bytes)
    params = _params(composite, dtype)
    for file in files:
        _write_file(folder / file.name, file, params, dtype)
    if len(files) > 1:
        _write_json(folder / "model.safetensors.index.json", _index(files, dtype))
    config = composite.run.model_config_json | {"dtype": dtype}
    if "use_cache" in config:
        config["use_cache"] = True  # switched off for training alone
    config.pop("torch_dtype", None)
    _write_json(folder / "config.json", config)
    return (*_write_tokenizer(folder, composite.run.tokenizer_files), *_notes(composite))


def _write_tokenizer(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Their names stand in a store: one that leads elsewhere, or is that of the model itself, is left out."""
    notes = []
    for name, text in files.items():
        if not _PLAIN_NAME.fullmatch(name) or (folder / name).exists():
            notes.append(f"run.json names a tokenizer file {name!r} that can be none: it is left out")
            continue
        (folder / name).write_text(text, encoding="utf-8")
    return notes


def _notes(composite: Composite) -> tuple[str, ...]:
    run = composite.run
    notes = []
    if not run.tokenizer_files:
        notes.append("run.json has no tokenizer files: copy them from the model that the run began with")
    if run.buffers:
        notes.append(f"the values of the model's buffers ({run.buffers[0]}, ...) are in no store")
    return tuple(notes)


def _refuse_foreign(composite: Composite) -> None:
    run = composite.run
    if not run.model_config_json:
        raise ConfigError(
            f"--to hf: run {run.name} has no model config, so its model is none of transformers: use --to "
            "deepspeed"
        )
    adapters = [name for name in run.layer_map.layer_of if name.startswith(_PEFT)]
    if adapters:
        raise ConfigError(
            f"--to hf: run {run.name} trains adapters ({adapters[0]}), and from_pretrained reads whole "
            "models: use --to deepspeed"
        )


def _split(composite: Composite, itemsize: int, limit: int) -> list[_File]:
    parts: list[list[ParamSpec]] = [[]]
    used = 0
    for spec in (spec for layer in composite.run.layer_map.layers for spec in layer.params):
        if used and used + spec.numel * itemsize > limit:
            parts.append([])
            used = 0
        parts[-1].append(spec)
        used += spec.numel * itemsize
    if len(parts) == 1:
        return [_File("model.safetensors", tuple(parts[0]))]
    return [
        _File(f"model-{index + 1:05d}-of-{len(parts):05d}.safetensors", tuple(part))
        for index, part in enumerate(parts)
    ]


def _params(composite: Composite, dtype: str) -> Iterator[tuple[ParamSpec, Array]]:
    """Every parameter with its bytes, in the order of the files."""
    for layer in composite.layers(frozenset([MASTER, FROZEN])):
        for spec in composite.run.layer_map.by_name[layer.layer].params:
            yield spec, _cast(layer.slices.pop(spec.name), spec, dtype)


def _cast(fetched: FetchedSlice, spec: ParamSpec, dtype: str) -> Array:
    (key,) = fetched.tensors
    raw, held = fetched.tensors[key], fetched.dtypes[key]
    if held not in _CASTABLE:
        raise ConfigError(
            f"--to hf: parameter {spec.name} is held as {held}, a quantised model is not exported"
        )
    if held == DTYPES[dtype] or not raw.size:
        return raw
    cast = elements(torch.from_numpy(raw), held).to(TORCH_DTYPES[DTYPES[dtype]])
    array: Array = cast.view(torch.uint8).numpy()
    return array


def _write_file(path: Path, file: _File, params: Iterator[tuple[ParamSpec, Array]], dtype: str) -> None:
    with path.open("wb") as target:
        _write_header(target, file, DTYPES[dtype])
        for expected in file.params:
            spec, raw = next(params)
            assert spec == expected, f"{spec.name} comes where {expected.name} belongs"
            target.write(raw.data)
            del raw  # else it would be held while the next layer is read


def _write_header(target: BinaryIO, file: _File, dtype: str) -> None:
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in file.params:
        begin, end = end, end + spec.numel * DTYPE_BYTES[dtype]
        entries[spec.name] = {"dtype": dtype, "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-len(text) % 8)
    target.write(len(text).to_bytes(8, "little") + text)


def _index(files: list[_File], dtype: str) -> dict[str, Any]:
    numel = sum(spec.numel for file in files for spec in file.params)
    return {
        "metadata": {"total_size": numel * DTYPE_BYTES[DTYPES[dtype]]},
        "weight_map": {spec.name: file.name for file in files for spec in file.params},
    }


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
