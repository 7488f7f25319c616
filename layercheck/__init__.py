"""LayerCheck: saves the layers that drifted, recovers at the next step."""

from importlib import import_module
from typing import Any

_HOMES = {
    "Session": "layercheck.session",
    "attach": "layercheck.session",
    "listen": "layercheck.end_signals",
    "layer_groups": "layercheck.zero3",
}

__all__ = ["Session", "attach", "layer_groups", "listen"]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'layercheck' has no attribute {name!r}")
