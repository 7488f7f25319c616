"""LayerCheck: saves the layers that drifted, recovers at the next step."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # for checkers of types and editors; the names are loaded when they are first used
    from layercheck.end_signals import listen
    from layercheck.session import Session, attach
    from layercheck.zero3 import layer_groups

__version__ = "0.1.0"
"""The one place of the version; `pyproject.toml` reads it from here."""

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
