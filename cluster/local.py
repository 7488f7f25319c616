"""A Ray cluster of several nodes on this machine, for laptops and continuous integration.

    python -m cluster.local --nodes 3                          # until Ctrl-C; prints what to export elsewhere
    python -m cluster.local --nodes 3 -- python -m app --config tiny       # runs the command, then ends

It has its own ports, temporary folders and token, joins no other cluster of the machine, and stops only what
it started. The head is the first of the nodes.
"""

# ruff: noqa: T201
import argparse
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from types import FrameType

from cluster.head import PrivateHead, PrivateNode, start_head, start_node
from layercheck.errors import LayerCheckError

_PAUSE_S = 1.0
_END_S = 60.0


def run(nodes: int, cpus: int, command: list[str]) -> int:
    """Starts the cluster, runs `command` or waits for Ctrl-C, stops all of it.

    Args:
        nodes: the head included.
        cpus: offered by each node; may be more than the machine has.
        command: gets the address and the token by its environment; empty for none.

    Returns:
        The exit code of the command; without one 0, or 1 if the head ended by itself.

    Raises:
        HeadError: a node did not start, or does not end.
    """
    with ExitStack() as stack:
        head = stack.enter_context(start_head(num_cpus=cpus))
        others = [stack.enter_context(start_node(head, cpus)) for _ in range(nodes - 1)]
        print(f"{nodes} Ray nodes with {cpus} CPUs each, dashboard at {head.dashboard}", flush=True)
        if command:
            return _run(command, head)
        print("\n".join(f"export {key}={shlex.quote(text)}" for key, text in sorted(head.env.items())))
        print("Ctrl-C ends them", flush=True)
        return _watch(head, others)


def _run(command: list[str], head: PrivateHead) -> int:
    process = subprocess.Popen(command, env=head.client_env)
    try:
        return process.wait()
    except BaseException:
        # Ctrl-C reached the command as well, SIGTERM did not: it may save before its cluster goes.
        process.terminate()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
        raise


def _watch(head: PrivateNode, others: list[PrivateNode], sleep: Callable[[float], None] = time.sleep) -> int:
    """Says which node ended by itself; the cluster goes on without it, but not without its head."""
    left = dict(enumerate(others, start=2))
    try:
        while head.process.poll() is None:
            for number, node in list(left.items()):
                if node.process.poll() is not None:
                    print(f"node {number} ended with code {node.process.returncode}", flush=True)
                    del left[number]
            sleep(_PAUSE_S)
    except KeyboardInterrupt:
        return 0
    print(f"error: the head ended with code {head.process.returncode}", file=sys.stderr)
    return 1


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code: that of the command; 0 after Ctrl-C, 1 if the cluster failed, 2 usage."""
    parser = argparse.ArgumentParser(prog="python -m cluster.local", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--nodes", type=_count, default=3, metavar="N", help="the head included")
    parser.add_argument("--cpus", type=_count, default=2, metavar="C", help="offered by each node")
    parser.add_argument("command", nargs="*", metavar="-- COMMAND", help="run this on it, then end")
    args = parser.parse_args(arguments)
    for sig in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(sig, _interrupt)
    try:
        return run(args.nodes, args.cpus, args.command)
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
