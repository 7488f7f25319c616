"""[pure] Closed forms of the effective training time ratio (ETTR), and optimal checkpoint intervals.

A method is (tau, delta, R): useful seconds protected per commit, visible stall per commit, recovery (detect,
restart, load, reconstruct). c = tau + delta, M = MTBF. Failures form a renewal process with law U of the time
between them. ETTR = useful time that was kept / elapsed time. What is lost since the last commit is not in R:
it falls out of the law, so no "half an interval" is assumed anywhere.
"""

from math import ceil, exp, expm1, gamma, inf, log, sqrt
from typing import Literal

import numpy as np
import numpy.typing as npt

from layercheck.errors import ConfigError
from simulations.checks import not_negative, positive

Floats = npt.NDArray[np.float64]
LawName = Literal["exponential", "weibull"]
_SMALLEST_TERM = 1e-13
_EXACT_TERMS, _TAIL_BLOCKS = 50_000, 5_000


def ettr(
    tau_s: float,
    stall_s: float,
    recovery_s: float,
    mtbf_s: float,
    *,
    law: LawName = "exponential",
    shape: float | None = None,
    failures_in_recovery: bool = True,
    commit_delay_s: float = 0.0,
) -> float:
    """Long-run ETTR of one method under one failure law.

    Any renewal law (E[U] = M): without failures during recovery tau sum_{j>=1} P(U >= j c) / (M + R); with
    them (a failure during recovery begins it again) tau sum_{j>=1} P(U >= R + j c) / M. For the exponential
    law the sums are geometric: tau / [(M + R)(exp(c/M) - 1)] and tau / [M exp(R/M)(exp(c/M) - 1)]. A commit
    that counts d seconds after its stall moves every term by d.

    Args:
        tau_s: useful seconds per commit.
        stall_s: visible stall per commit in seconds.
        recovery_s: seconds from a failure to the first useful step, without replayed steps.
        mtbf_s: mean time between failures in seconds; `inf` for no failures.
        law: of the time between failures.
        shape: Weibull k, P(U >= x) = exp(-(x / lam)^k), lam = M / Gamma(1 + 1/k); only for `weibull`.
        failures_in_recovery: failures may hit a recovery, too.
        commit_delay_s: d, from the end of the stall until a commit counts.

    Raises:
        ConfigError: a time is negative, NaN or (tau, MTBF) zero, or law and shape do not fit.
    """
    positive("tau_s", tau_s)
    not_negative("stall_s", stall_s)
    not_negative("recovery_s", recovery_s)
    if mtbf_s == inf:
        return tau_s / (tau_s + stall_s)
    positive("mtbf_s", mtbf_s)
    cycle_s = tau_s + stall_s
    delay_s = not_negative("commit_delay_s", commit_delay_s) + (recovery_s if failures_in_recovery else 0.0)
    elapsed_s = mtbf_s if failures_in_recovery else mtbf_s + recovery_s
    if law == "exponential":
        if shape is not None:
            raise ConfigError(f"shape={shape:g} belongs to law='weibull', not to law='exponential'")
        commits = exp(-(delay_s + cycle_s) / mtbf_s) / -expm1(-cycle_s / mtbf_s)
    elif law == "weibull":
        if shape is None:
            raise ConfigError("law='weibull' needs shape (k; LANL: 0.65 to 0.9)")
        commits = _weibull_commits(cycle_s, delay_s, mtbf_s, positive("shape", shape))
    else:
        raise ConfigError(f"law={law!r} must be 'exponential' or 'weibull'")
    return tau_s * commits / elapsed_s


def _weibull_commits(cycle_s: float, delay_s: float, mtbf_s: float, shape: float) -> float:
    """sum_{j>=1} P(U >= delay + j c): mean number of commits between two failures.

    The first terms one by one; the tail, where c is small against every feature of the law, by blocks, each
    as often as it is long at its middle.
    """
    scale_s = mtbf_s / gamma(1 + 1 / shape)
    reach_s = scale_s * (-log(_SMALLEST_TERM)) ** (1 / shape)
    terms = max(1, ceil((reach_s - delay_s) / cycle_s))
    exact = min(terms, _EXACT_TERMS)
    j, size = np.arange(1, exact + 1, dtype=np.float64), np.ones(exact)
    if terms > exact:
        edges = np.geomspace(exact, terms, _TAIL_BLOCKS + 1)
        j = np.concatenate([j, (edges[:-1] + edges[1:] + 1) / 2])
        size = np.concatenate([size, np.diff(edges)])
    return float(size @ np.exp(-(((delay_s + j * cycle_s) / scale_s) ** shape)))


def empirical_ettr(
    tau_s: float,
    stall_s: float,
    recovery_s: float,
    gaps_s: Floats,
    failures_in_recovery: bool = True,
    commit_delay_s: float = 0.0,
) -> float:
    """ETTR under the law of observed gaps, each equally likely.

    sum_{j>=1} P(U >= R + j c) = E[floor((U - R)+ / c)].

    Args:
        tau_s: useful seconds per commit.
        stall_s: visible stall per commit in seconds.
        recovery_s: seconds from a failure to the first useful step.
        gaps_s: shape (n,), seconds between failures.
        failures_in_recovery: failures may hit a recovery, too.
        commit_delay_s: from the end of the stall until a commit counts.
    """
    delay_s = commit_delay_s + (recovery_s if failures_in_recovery else 0.0)
    commits = np.floor(np.maximum(gaps_s - delay_s, 0.0) / (tau_s + stall_s)).mean()
    elapsed_s = gaps_s.mean() + (0.0 if failures_in_recovery else recovery_s)
    return float(tau_s * commits / elapsed_s)


def young_interval_s(stall_s: float, mtbf_s: float) -> float:
    """First-order optimal tau in seconds: sqrt(2 delta M) (Young 1974)."""
    return sqrt(2 * not_negative("stall_s", stall_s) * positive("mtbf_s", mtbf_s))


def daly_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Optimal tau in seconds to higher order (Daly 2006).

    sqrt(2 delta M) [1 + sqrt(delta / 2M) / 3 + (delta / 2M) / 9] - delta for delta < 2M, else M.
    """
    if stall_s >= 2 * mtbf_s:
        return positive("mtbf_s", mtbf_s)
    part = stall_s / (2 * mtbf_s)
    return young_interval_s(stall_s, mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - stall_s


def small_loss_ettr(interval_s: float, stall_s: float, restart_s: float, failures_per_s: float) -> float:
    """Meta's form for small losses: (1 - r (u0 + dt/2)) / (1 + w/dt) (arXiv 2410.21680).

    Args:
        interval_s: dt, useful seconds between checkpoints.
        stall_s: w, seconds that a checkpoint takes from training.
        restart_s: u0.
        failures_per_s: r, of the whole job (number of nodes times the rate of one).
    """
    return (1 - failures_per_s * (restart_s + interval_s / 2)) / (1 + stall_s / interval_s)
