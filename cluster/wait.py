"""Waits until a Ray cluster has as many nodes as it is to have.

    RAY_ADDRESS=10.0.0.1:6379 python -m cluster.wait --nodes 4 --limit-s 300

A run refuses to start on a cluster that is too small for it, so a script that starts nodes has to wait for
them first. More nodes than asked for are fine.
"""

# ruff: noqa: T201
import argparse
import logging
import os
import sys
import time
from collections.abc import Callable

import ray

from layercheck.errors import ConfigError, LayerCheckError

_PAUSE_S = 1.0


class NodesMissingError(LayerCheckError):
    """The cluster did not come up in time."""


def wait_for_nodes(
    wanted: int,
    limit_s: float,
    count: Callable[[], int],
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> int:
    """Asks `count` until it says at least `wanted`; returns what it said.

    Args:
        wanted: nodes.
        limit_s: seconds.
        count: living nodes; raises ConnectionError while nobody answers.
        clock: seconds.
        sleep: waits some seconds.

    Raises:
        NodesMissingError: after `limit_s`; says how many there were.
    """
    deadline, last = clock() + limit_s, "no cluster answers"
    while True:
        try:
            found = count()
            if found >= wanted:
                return found
            last = f"{found} are there"
        except ConnectionError as error:
            last = f"no cluster answers ({str(error).splitlines()[0] if str(error) else 'no reason given'})"
        if clock() >= deadline:
            raise NodesMissingError(f"{wanted} Ray nodes were not up within {limit_s:g} s: {last}")
        sleep(_PAUSE_S)


def living_nodes() -> int:
    """Nodes of the cluster of RAY_ADDRESS; joins it at the first call."""
    if not ray.is_initialized():
        ray.init(address=os.environ["RAY_ADDRESS"], log_to_driver=False, logging_level=logging.ERROR)
    return sum(bool(node["Alive"]) for node in ray.nodes())  # type: ignore[no-untyped-call]


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: 0 all are there, 1 not in time, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m cluster.wait", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="at least so many")
    parser.add_argument("--limit-s", type=float, default=300.0, help="seconds to wait")
    args = parser.parse_args(arguments)
    try:
        if not os.environ.get("RAY_ADDRESS"):
            raise ConfigError("no cluster: set RAY_ADDRESS to host:port")
        found = wait_for_nodes(args.nodes, args.limit_s, living_nodes)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{found} Ray nodes at {os.environ['RAY_ADDRESS']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
