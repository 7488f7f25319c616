"""What the death of a worker, a node or the cluster would leave, in words and as rows of a table."""

from typing import Any

from layercheck.commands.answer import number
from layercheck.coordination.deaths import DEATHS

HEADER = ("layer", *(f"a {death} dies" for death in DEATHS))


def memory_helps(value: dict[str, Any]) -> bool:
    """True if an answer of `status` has a layer that would come back from memory."""
    return any(layer["if_dies"]["worker"]["tier"] == "memory" for layer in _known(value))


def in_words(value: dict[str, Any]) -> str:
    """Lost steps of the whole model, and how many layers have a copy in memory."""
    lost, layers = value["if_dies"], _known(value)
    held = sum(layer["if_dies"]["worker"]["tier"] == "memory" for layer in layers)
    return (
        f"with the memory tier: lost steps if a worker dies now {_lost(lost['worker'])} "
        f"({held} of {len(layers)} layers from memory), a node {_lost(lost['node'])}, "
        f"the cluster {_lost(lost['cluster'])}"
    )


def rows(value: dict[str, Any]) -> list[tuple[str, ...]]:
    """For each layer the tier, the step of the save and the lost steps, by what dies."""
    return [(layer["name"], *(_left(layer["if_dies"][death]) for death in DEATHS)) for layer in _known(value)]


def _known(value: dict[str, Any]) -> list[dict[str, Any]]:
    return [layer for layer in value["layers"] if layer["if_dies"] is not None]


def _left(left: dict[str, Any]) -> str:
    best = left.get("at_best")
    more = f", at best {_left(best)}" if best else ""
    return f"{left['tier']} {left['step']} (lost {left['lost']}){more}"


def _lost(lost: dict[str, float]) -> str:
    best = f" (at best {number(lost['at_best'])})" if "at_best" in lost else ""
    return f"{number(lost['lost_steps'])}{best}"
