"""Commits that die with nodes: what a method loses that keeps them in memory and only some of them far away.

Each failure of `far_kinds` takes (commits since the last such failure) mod F of them, F commits being made
per far copy: it leaves the count at a multiple of F.
"""

from math import exp, expm1

import numpy as np

from simulations.failures import KINDS, FailureModel
from simulations.methods import Method


def destroyed_ettr(method: Method, failures: FailureModel) -> float:
    """Part of the elapsed time that was useful until a failure destroyed its commits, exponential law.

    A stretch holds n commits, P(n >= j) = a x^j, x = exp(-c / M), a = exp(-(R + d) / M), so its generating
    function is g(z) = 1 - a x + a (1 - x) x z / (1 - x z). With q the part of far failures, the N commits
    between two of them have q g(z) / (1 - (1 - q) g(z)), and its values at the F-th roots of unity give
    P(N mod F = r), hence the mean of N mod F. Without failures in recoveries a = exp(-d / M).
    """
    far = sum(part for kind, part in zip(KINDS, failures.mix, strict=True) if kind in method.far_kinds)
    if not method.far_every or far == 0:
        return 0.0
    recovery_s = method.recovery_s(failures.mix)
    if failures.repair is not None:
        recovery_s += failures.repair.mean_s
    elapsed_s = failures.mtbf_s if failures.in_recovery else failures.mtbf_s + recovery_s
    before_s = method.delay_s + (recovery_s if failures.in_recovery else 0.0)
    begun = exp(-before_s / failures.mtbf_s)
    step, broken = exp(-method.cycle_s / failures.mtbf_s), -expm1(-method.cycle_s / failures.mtbf_s)
    roots = np.exp(2j * np.pi * np.arange(method.far_every) / method.far_every)
    stretch = 1 - begun * step + begun * broken * step * roots / (1 - step * roots)
    between = far * stretch / (1 - (1 - far) * stretch)
    parts = np.fft.fft(between).real / method.far_every
    gone = float(parts @ np.arange(method.far_every))
    return far * gone * method.tau_s / elapsed_s
