"""Trying again what a storage or a coordinator refused (I9)."""

import logging
import time
from collections.abc import Callable

from layercheck.errors import CoordinatorLostError, FencedError, StorageError

log = logging.getLogger(__name__)
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


def try_often(
    act: Callable[[], None], tries: int, what: str, is_hopeless: Callable[[], bool] = lambda: False
) -> Exception | None:
    """Does it, with growing pauses between the tries.

    Args:
        act: raises `StorageError` or `CoordinatorLostError` if it may be tried again.
        tries: at least 1.
        what: names it in the log.
        is_hopeless: asked after a failure; True ends the tries.

    Returns:
        None if it was done, or if the attempt that it belongs to was fenced off; else the last error.
    """
    pause_s = _FIRST_PAUSE_S
    for attempt in range(tries):
        try:
            act()
            return None
        except FencedError:
            log.warning("%s belongs to an attempt that was fenced off", what)
            return None
        except (StorageError, CoordinatorLostError) as error:
            if attempt + 1 == tries or is_hopeless():
                return error
            log.warning("%s: try %d failed: %s", what, attempt + 1, error)
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    raise AssertionError("unreachable")
