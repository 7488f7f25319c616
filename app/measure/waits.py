"""Waits for a run that has a cluster and a driver of its own: each with a limit, none outlives the driver."""

import time
from collections.abc import Callable

from cluster.private_run import PrivateRun
from layercheck.errors import LayerCheckError

LIMIT_S = 240.0
"""Longest wait for anything: the first step, a new group, a step after a recovery."""
_LOOK_S = 0.1


def wait_for(
    run: PrivateRun,
    is_there: Callable[[], bool],
    what: str,
    limit_s: float = LIMIT_S,
    look_s: float = _LOOK_S,
) -> None:
    """Looks every `look_s` seconds while the run's driver lives.

    Raises:
        LayerCheckError: the run ended, or `limit_s` is over.
    """
    deadline = time.monotonic() + limit_s
    while not is_there():
        code = run.driver_ended()
        if code is not None:
            raise LayerCheckError(
                f"run {run.name} ended with code {code} while {what} was waited for: {run.last_words()}"
            )
        if time.monotonic() > deadline:
            raise LayerCheckError(
                f"run {run.name}: waited {limit_s:.0f} s in vain for {what}; its log ends: {run.last_words()}"
            )
        time.sleep(look_s)


def wait_for_end(run: PrivateRun, limit_s: float) -> None:
    """Waits until the run is complete.

    Raises:
        LayerCheckError: it ended with an error, or `limit_s` is over.
    """
    deadline = time.monotonic() + limit_s
    while (code := run.driver_ended()) is None:
        if time.monotonic() > deadline:
            raise LayerCheckError(
                f"run {run.name} was not complete within {limit_s:.0f} s; its log ends: {run.last_words()}"
            )
        time.sleep(_LOOK_S)
    if code:
        raise LayerCheckError(f"run {run.name} ended with code {code}: {run.last_words()}")
