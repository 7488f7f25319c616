"""What run.json says of a model beside its layers: enough to write it in the formats of others."""

import json
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

_TEXTS = (".json", ".jinja", ".txt")


def model_config(module: nn.Module) -> dict[str, Any]:
    """The model's own `config.json` with its class as `architectures`, or an empty dict."""
    config: Any = getattr(module, "config", None)
    if not hasattr(config, "to_json_string"):
        return {}
    described = dict(json.loads(config.to_json_string(use_diff=False)))
    return described | {"architectures": [type(module).__name__]}


def tied_names(module: nn.Module) -> dict[str, str]:
    """Every further name of a shared parameter -> its first one."""
    first = {id(param): name for name, param in module.named_parameters()}
    named = module.named_parameters(remove_duplicate=False)
    return {name: first[id(param)] for name, param in named if first[id(param)] != name}


def buffer_names(module: nn.Module) -> tuple[str, ...]:
    """Names of the buffers in the model's state dict."""
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    return tuple(name for name in module.state_dict(keep_vars=True) if name not in parameters)


def tokenizer_files(tokenizer: Any) -> dict[str, str]:
    """Name -> text of the files that make a fast tokenizer of transformers; binary twins are left out."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = sorted(path for path in Path(folder).iterdir() if path.suffix in _TEXTS)
        return {path.name: path.read_text(encoding="utf-8") for path in files}


def json_settings(group: dict[str, Any]) -> dict[str, Any]:
    """The settings of an optimizer group; what is no JSON value is left out, a tuple becomes a list."""
    values = {key: _plain(value) for key, value in group.items() if key != "params"}
    return {
        key: value
        for key, value in values.items()
        if value is None or isinstance(value, bool | int | float | str | list)
    }


def _plain(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
