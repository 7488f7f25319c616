"""[pure] How many differentials go into one file, and how often a base is taken: the paper's optimum."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Costs:
    """What the optimum depends on.

    Attributes:
        step_s: seconds of a training step.
        apply_s: seconds to replay one differential (R_D).
        base_bytes: size of a base, all ranks together (S).
        write_bytes_per_s: rate at which all ranks together write one (W_s).
        mtbf_s: mean seconds between two failures (M).
    """

    step_s: float
    apply_s: float
    base_bytes: float
    write_bytes_per_s: float
    mtbf_s: float


@dataclass(frozen=True, slots=True)
class Rhythm:
    """`batch`: steps in one file (b). `base_every`: steps between two bases (F), never fewer than `batch`."""

    batch: int
    base_every: int


def optimum(costs: Costs) -> Rhythm:
    """The rhythm that wastes least.

    The paper (LowDiff, tuning section) minimises, over the batch b in seconds of training and the frequency
    of bases f in 1/s, the time lost to failures and to writing bases:
    (1/M) [b/2 + R_F + (R_D/2) (1/(f b) - 1)] + (S/W_s) f. Both derivatives vanish at
    f = (R_D W_s^2 / (4 S^2 M^2))^(1/3) and b = (2 S R_D M / W_s)^(1/3). Here both become steps, at least one.
    """
    base_s = costs.base_bytes / costs.write_bytes_per_s
    base_hz = (costs.apply_s / (4 * base_s**2 * costs.mtbf_s**2)) ** (1 / 3)
    batch_s = (2 * base_s * costs.apply_s * costs.mtbf_s) ** (1 / 3)
    batch = max(1, round(batch_s / costs.step_s))
    return Rhythm(batch=batch, base_every=max(batch, round(1 / (base_hz * costs.step_s))))
