"""The only file of the simulation that knows Ray: cells as tasks of the cluster of RAY_ADDRESS."""

import os
from collections import deque
from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import Any

from layercheck.errors import LayerCheckError
from simulations.sweep import Cell, CellResult, run_cell

_IN_FLIGHT = 256
"""Tasks submitted ahead: enough for a large cluster, little enough for the driver's memory."""
_WAIT_S = 1800.0


def has_cluster() -> bool:
    """True in a Ray job, and wherever RAY_ADDRESS names a cluster."""
    return bool(os.environ.get("RAY_ADDRESS"))


def run_on_ray(cells: list[Cell]) -> Iterable[CellResult]:
    """Runs each cell as one task; yields the results in the order of the cells.

    Raises:
        LayerCheckError: the cluster ran no task within the limit, or Ray is not installed.
    """
    try:
        import ray
    except ImportError:
        raise LayerCheckError(
            "RAY_ADDRESS is set but Ray is not installed: install layercheck[ray], or pass --here"
        ) from None
    cluster: Any = ray
    _join(cluster)
    task = cluster.remote(num_cpus=1)(run_cell)
    todo = iter(cells)
    flying = deque[Any](task.remote(cell) for cell in islice(todo, _IN_FLIGHT))
    while flying:
        yield _get(cluster, flying.popleft())
        flying.extend(task.remote(cell) for cell in islice(todo, 1))


def _join(ray: Any) -> None:
    if ray.is_initialized():
        return
    # A job brings its working folder; a plain driver has to say where its code is.
    in_job = "RAY_JOB_CONFIG_JSON_ENV_VAR" in os.environ
    root = str(Path(__file__).resolve().parents[1])
    runtime_env = {} if in_job else {"env_vars": {"PYTHONPATH": root}}
    ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, runtime_env=runtime_env)


def _get(ray: Any, reference: Any) -> CellResult:
    try:
        result: CellResult = ray.get(reference, timeout=_WAIT_S)
    except ray.exceptions.GetTimeoutError:
        raise LayerCheckError(
            f"the cluster of RAY_ADDRESS ran no simulation task within {_WAIT_S:g} s: has it a free CPU?"
        ) from None
    return result
