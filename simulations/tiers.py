"""LayerCheck with its tiers: what they keep, what they cost, and which failure each survives.

Where a process dies, the vault of its node has the copies; a node takes its vault, and that of another node
has them if there are replicas; a cluster takes all memory, and the storage is left
(`docs/explanation/memory-tier.md`). GEMINI's copies live by the same rule; engines know it as `far_kinds`.

Costs are derived from those of the composite method, by rules that lean against us where they are unsure:

- A full state copied to memory stalls as long as was measured of a full event; where that is unknown, as long
  as the versions that make one up, though no byte of it is written.
- Residuals stall per byte as versions do, by the bytes that are staged: 4 of a version's 12, coded only when
  they are written.
- Recoveries take as long from memory as from the storage. With residuals each layer is then written within
  `1 / max_event_share` steps, so that they have something to count from: one more state a recovery.
"""

from dataclasses import dataclass, replace
from math import ceil

from layercheck.config import LayerCheckConfig, MemoryConfig
from layercheck.errors import ConfigError
from simulations.charges import COPIES, STAGED, copy_stall_s
from simulations.checks import positive
from simulations.copies import Tier
from simulations.costs import Costs, MethodCosts
from simulations.methods import Method, Recovery
from simulations.schedules import Schedule, schedule_of

K_RATIO = MemoryConfig().k_ratio
"""Drift adds up, so the steps between two copies of a layer are to those between two versions as their
thresholds are."""
MAX_EVENT_SHARE = LayerCheckConfig().max_event_share
"""Largest part of the state that is copied at one step: no mean interval is below its inverse, but for memory
that takes all layers at every step."""
AFTER_MEMORY_STEPS = ceil(1 / MAX_EVENT_SHARE)
"""With residuals, steps from a recovery from memory until every layer has a version again."""
MEMORY_DELAY_STEPS = 1
"""A copy is sealed beside the step after it: a failure there finds the one before."""
REPLICA_DELAY_STEPS = 2
"""The other node has it a step later."""


@dataclass(frozen=True, slots=True)
class ResidualPoint:
    """Residuals beside the same run without, measured by `python -m simulations.measure residuals`.

    Attributes:
        lost_part: distance in weight space that a failure loses / without residuals, at real kills. Lost
            steps shrink more (8.8 % at the usual point), as weights go straight for short ways; the larger
            of both is charged.
        versions_part: steps between two versions / those without residuals.
        residuals_part: steps between two residuals / those between two versions without residuals.
    """

    lost_part: float
    versions_part: float
    residuals_part: float

    def __post_init__(self) -> None:
        for name in ("lost_part", "versions_part", "residuals_part"):
            positive(name, getattr(self, name))
        if self.lost_part > 1:
            raise ConfigError(f"lost_part={self.lost_part:g} must be at most 1: residuals lose no more")

    @property
    def staged_part(self) -> float:
        """Bytes that steps copy / without residuals."""
        return 1 / self.versions_part + STAGED / self.residuals_part


MEASURED_RESIDUALS = ResidualPoint(
    lost_part=0.1601595587890991,
    versions_part=791.7418923436977 / 130.80895959344878,
    residuals_part=11.573923604577567 / 130.80895959344878,
)
"""8 bits, V 800, r 8 of `simulations/results/2026-11-30/residuals`, 1.14 x the bytes; a test holds it to that
file."""


@dataclass(frozen=True, slots=True)
class TierSet:
    """Which tiers LayerCheck runs with.

    Attributes:
        suffix: of the method's name.
        residuals: None: none are written.
        memory_k_ratio: None: no memory; 0: all layers at every step.
        replicas: copies go to another node, too.
    """

    suffix: str
    residuals: ResidualPoint | None = None
    memory_k_ratio: float | None = None
    replicas: bool = True

    def tiers(self, versions: Schedule) -> tuple[Tier, ...]:
        """The tiers beside versions that would be written by `versions` if there were no others."""
        found = [Tier("storage", versions)]
        if self.residuals is not None:
            found = [
                Tier("storage", _stretched(versions, self.residuals.versions_part)),
                Tier(
                    "residuals",
                    _stretched(versions, self.residuals.lost_part),
                    after_memory_steps=AFTER_MEMORY_STEPS,
                ),
            ]
        memory = self._memory(versions)
        if memory is not None:
            found.append(Tier("memory", replace(memory, delay_steps=MEMORY_DELAY_STEPS), ("process",)))
            if self.replicas:
                peer = replace(memory, delay_steps=REPLICA_DELAY_STEPS)
                found.append(Tier("replicas", peer, ("process", "node")))
        return tuple(found)

    def stall_s(self, cost: MethodCosts, versions: Schedule) -> float:
        """Stall of a step, where versions alone would be written by `versions`."""
        memory = self._memory(versions)
        copies = {"versions": versions.per_step, "memory": 0.0 if memory is None else memory.per_step}
        if self.residuals is not None:
            copies["versions"] = versions.per_step / self.residuals.versions_part
            copies["residuals"] = versions.per_step / self.residuals.residuals_part
        return cost.stall_fixed_s + sum(
            copy_stall_s(cost, copied) * copies.get(copied, 0.0) for copied in COPIES
        )

    def recovery(
        self, cost: MethodCosts, usual: tuple[Recovery, Recovery, Recovery]
    ) -> tuple[Recovery, Recovery, Recovery]:
        """Recoveries by kind of failure: from memory one more state is written, if there are residuals."""
        if self.residuals is None or self.memory_k_ratio is None:
            return usual
        process, node, cluster = usual
        more_s = copy_stall_s(cost, "versions")
        process = replace(process, reconstruct_s=process.reconstruct_s + more_s)
        if self.replicas:
            node = replace(node, reconstruct_s=node.reconstruct_s + more_s)
        return process, node, cluster

    @property
    def staged_part(self) -> float:
        """Bytes that steps copy for the storage / for versions alone."""
        return 1.0 if self.residuals is None else self.residuals.staged_part

    def _memory(self, versions: Schedule) -> Schedule | None:
        if self.memory_k_ratio is None:
            return None
        return _stretched(versions, self.memory_k_ratio, 1 / MAX_EVENT_SHARE if self.memory_k_ratio else 1)


STORAGE = TierSet("")
TIER_SETS = (
    STORAGE,
    TierSet("residuals", residuals=MEASURED_RESIDUALS),
    TierSet("memory", memory_k_ratio=K_RATIO),
    TierSet("memory_each_step", memory_k_ratio=0.0),
    TierSet("residuals_memory", residuals=MEASURED_RESIDUALS, memory_k_ratio=K_RATIO),
)
"""What is compared: versions alone, each tier with them, and both."""


def name_of(method: str, tiers: TierSet) -> str:
    """Name of a method with these tiers."""
    return f"{method}_{tiers.suffix}" if tiers.suffix else method


def composite(
    name: str, costs: Costs, factor: float, tiers: TierSet = STORAGE
) -> tuple[Method, tuple[Tier, ...]]:
    """A composite method with all its intervals stretched by `factor`, and where its copies lie."""
    cost = costs.methods[name]
    schedule = schedule_of(cost, costs.t_iter_s, factor)
    assert schedule is not None, f"{name} has no layers"
    stall_s = tiers.stall_s(cost, schedule)
    if factor == 1.0 and tiers == STORAGE:
        stall_s = cost.stall_s  # as measured: periods are whole steps, so the computed one is off by a bit
    method = cost.method(name_of(name, tiers), costs.t_iter_s).at(1, stall_s)
    return replace(method, recovery=tiers.recovery(cost, method.recovery)), tiers.tiers(schedule)


def tier_sets(replicas: bool) -> tuple[TierSet, ...]:
    """`TIER_SETS`, with or without copies on other nodes."""
    return tuple(replace(tiers, replicas=replicas) for tiers in TIER_SETS)


def _stretched(schedule: Schedule, part: float, least: float = 1) -> Schedule:
    """Copies after `part` of the steps each, at least `least`."""
    return replace(
        schedule,
        periods=tuple(ceil(max(least, period * part) - 1e-9) for period in schedule.periods),
        writes=((0,),) * len(schedule.periods),
    )
