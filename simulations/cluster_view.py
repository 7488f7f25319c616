"""From a cluster to its failures: nodes and a rate give the MTBF; causes give the mix; costs are scaled.

Scaling model (stated, not measured): the model grows with the cluster, so a step and the bytes of one
device stay as they are. Aggregate storage bandwidth grows as devices^(1 - storage_exponent): at 0 every
node brings its own share, at 1 one file system serves all; stalls and loads grow by the rest. A restart
takes `restart_per_doubling_s` more with each doubling of the devices (ByteRobust, arXiv 2509.16293: requeue
454 s at 2k devices to 768 s at 16k, in-place update 46 s to 65 s). Detection does not change.
"""

import argparse
from dataclasses import dataclass
from math import log2

from layercheck.errors import ConfigError
from simulations.checks import not_negative, positive
from simulations.costs import Costs, MethodCosts, RecoveryCosts

GPUS_PER_NODE = 8
CLUSTER_GPUS = tuple(8 * 2**power for power in range(15))
"""8 to 131,072."""
RATES = {"rsc1": 6.50, "rsc2": 2.34, "llama3": 3.79}
"""Failures per 1,000 node-days: Meta RSC-1 and RSC-2 (arXiv 2410.21680), Llama 3 (arXiv 2407.21783)."""
RESTARTS = {"in_place": (65 - 46) / 3, "requeue": (768 - 454) / 3}
"""Seconds more per doubling of the devices (ByteRobust)."""

LLAMA3_CAUSES = {
    "process": {"software bug": 54, "NCCL watchdog": 7, "dependency": 2},
    "node": {
        "faulty GPU": 148, "HBM3": 72, "host maintenance": 32, "GPU SRAM": 19, "GPU system processor": 17,
        "NIC": 7, "silent data corruption": 6, "GPU thermal and sensor": 6, "SSD": 3, "power supply": 3,
        "chassis": 2, "IO board": 2, "CPU": 2, "system memory": 2,
    },
    "cluster": {"switch or cable": 35},
}  # fmt: skip
"""Llama 3, table 5 (419 unexpected interruptions), by what is lost. A switch takes several nodes at once: for
a method that keeps copies in the memory of peers that is as bad as the loss of all."""


def mix_of(causes: dict[str, dict[str, int]]) -> tuple[float, float, float]:
    """Part of process, node and cluster failures."""
    counts = [sum(causes[kind].values()) for kind in ("process", "node", "cluster")]
    total = sum(counts)
    return counts[0] / total, counts[1] / total, counts[2] / total


MIXES = {"process": (1.0, 0.0, 0.0), "llama3": mix_of(LLAMA3_CAUSES)}


def parse_mix(text: str) -> tuple[float, float, float]:
    """A name of `MIXES`, or three parts of process, node and cluster failures.

    Raises:
        ConfigError: neither.
    """
    if text in MIXES:
        return MIXES[text]
    try:
        first, second, third = (float(part) for part in text.split(","))
    except ValueError:
        names = ", ".join(MIXES)
        raise ConfigError(f"mix={text!r} must be one of {names}, or three parts like 0.5,0.4,0.1") from None
    return first, second, third


def mtbf_of_cluster(nodes: float, failures_per_1000_node_days: float) -> float:
    """MTBF in seconds of a job on all nodes, failures of nodes being independent."""
    rate = positive("failures_per_1000_node_days", failures_per_1000_node_days)
    return 1000 * 86400 / (rate * positive("nodes", nodes))


@dataclass(frozen=True, slots=True)
class Scaling:
    """See the head of this file."""

    storage_exponent: float = 0.0
    restart_per_doubling_s: float = RESTARTS["in_place"]

    def __post_init__(self) -> None:
        not_negative("storage_exponent", self.storage_exponent)
        not_negative("restart_per_doubling_s", self.restart_per_doubling_s)

    def costs(self, costs: Costs, gpus: int) -> Costs:
        """The costs on `gpus` devices."""
        ratio = positive("gpus", gpus) / costs.gpus
        slower = max(1.0, ratio**self.storage_exponent)
        later_s = max(0.0, self.restart_per_doubling_s * log2(ratio)) if ratio > 0 else 0.0
        methods = {name: _scaled(cost, slower, later_s) for name, cost in costs.methods.items()}
        return costs.model_copy(update={"gpus": gpus, "methods": methods})


def _scaled(cost: MethodCosts, slower: float, later_s: float) -> MethodCosts:
    variable_s = cost.stall_s - cost.stall_fixed_s
    return cost.model_copy(
        update={
            "stall_s": cost.stall_fixed_s + variable_s * slower,
            "min_interval_steps": max(1, round(cost.min_interval_steps * slower)),
            "recovery": _later(cost.recovery, slower, later_s),
            "recovery_node": cost.recovery_node and _later(cost.recovery_node, slower, later_s),
            "recovery_cluster": cost.recovery_cluster and _later(cost.recovery_cluster, slower, later_s),
        }
    )


def _later(recovery: RecoveryCosts, slower: float, later_s: float) -> RecoveryCosts:
    return recovery.model_copy(
        update={"restart_s": recovery.restart_s + later_s, "load_s": recovery.load_s * slower}
    )


def parse_rate(text: str) -> float:
    """Failures per 1,000 node-days: a name of `RATES`, or a number.

    Raises:
        ConfigError: neither.
    """
    if text in RATES:
        return RATES[text]
    try:
        return positive("rate", float(text))
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(f"rate={text!r} must be one of {', '.join(RATES)}, or a number") from None


def add_cluster_options(parser: argparse.ArgumentParser) -> None:
    """The options of a cluster: its rate of failures, and how costs grow with it."""
    parser.add_argument("--rate", default="rsc1", help=f"{', '.join(RATES)}, or failures per 1,000 node-days")
    parser.add_argument(
        "--storage-exponent", type=float, default=0.0, help="0: grows with the nodes; 1: fixed"
    )
    parser.add_argument("--restart", choices=sorted(RESTARTS), default="in_place", help="how restarts grow")


def scaling(options: argparse.Namespace) -> Scaling:
    """The scaling model of the command line."""
    return Scaling(options.storage_exponent, RESTARTS[options.restart])
