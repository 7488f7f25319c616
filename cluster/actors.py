"""What the actors of a run have in common: they outlive workers and drivers, and Ray brings them back."""

from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

NAMESPACE = "layercheck"
_MAX_CALLS = 64
"""Calls at once. Some of them wait: a coordinator that watches another submission for `takeover_s` sees that
one move only if its heartbeats are served meanwhile, and each rank of a node may drain the node's vault."""


def detached(kind: type, name: str, where: NodeAffinitySchedulingStrategy | None) -> Any:
    """The class as an actor of this name; the one that lives is taken, if there is one.

    It takes no CPU from the workers. A call is never repeated by Ray: clients do that, within their limits.
    """
    return ray.remote(kind).options(
        name=name,
        namespace=NAMESPACE,
        lifetime="detached",
        get_if_exists=True,
        num_cpus=0,
        max_restarts=-1,
        max_task_retries=0,
        max_concurrency=_MAX_CALLS,
        scheduling_strategy=where,
    )
