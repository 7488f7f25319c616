"""Adam on an online convex problem, with composite recoveries under bounded age (paper, section 3.6).

Problem: at step t a row x_t of unit norm and a noisy target y_t; f_t(w) = (x_t w - y_t)^2 / 2, convex.
Regret R(T) = sum f_t(w_t) - min_w sum f_t(w), the minimum by least squares over all rows so far. Adam with
alpha_t = alpha / sqrt(t), beta_{1,t} = beta_1 lambda^(t-1), no bias correction (paper 3.6.1).

Recovery at step tau: the coordinates are cut into layers; layer l goes back to (w, m, v) of step t_l with
tau - t_l <= s_max, drawn at random.

Bound of the added term. Adam's proof (Kingma and Ba 2015, theorem 4.1) sums for each coordinate sqrt(v_t) /
(2 alpha_t (1 - beta_1)) [(w_t - w*)^2 - (w_{t+1} - w*)^2], which telescopes. A jump at tau from (w, v) to
(w', v') breaks the chain and leaves at most sqrt(tau) / (2 alpha (1 - beta_1)) [ |sqrt(v') - sqrt(v)| D^2 +
max(sqrt(v), sqrt(v')) 2 D |w' - w| ], D the largest distance to w* seen, and |w' - w| <= D_l, the path
length. With |w' - w| <= s_max C alpha / sqrt(tau - s_max) the second part is O(1) in tau and the first
O(sqrt(tau)): a fixed number of recoveries adds O(sqrt(T)), a number that grows as sqrt(T) up to O(T), where
this bound no longer says that the average goes to 0. What is measured is printed beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from layercheck.errors import ConfigError

Floats = npt.NDArray[np.float64]
SCENARIOS = ("none", "fixed", "sqrt")
_LAYERS, _WIDTH = 8, 4
_NOISE = 0.1
_POINTS = 25


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes and rates; the same seed gives the same rows and the same failures.

    Attributes:
        steps: T.
        s_max: largest age of a layer at a recovery.
        num_failures: of the scenario `fixed`, at even distances on the logarithm of t.
    """

    steps: int = 100_000
    s_max: int = 50
    num_failures: int = 10
    seed: int = 0
    alpha: float = 0.5
    beta_1: float = 0.9
    beta_2: float = 0.999
    decay: float = 0.999

    def __post_init__(self) -> None:
        if self.steps < 4 * self.s_max:
            raise ConfigError(f"steps={self.steps} must be at least 4 x s_max={self.s_max}")

    def failures(self) -> dict[str, npt.NDArray[np.int64]]:
        """Scenario -> steps after which a recovery takes place, none in the first 2 s_max."""
        first = 2 * self.s_max
        fixed = np.geomspace(first, self.steps, self.num_failures + 2)[1:-1]
        roots = np.arange(np.ceil(np.sqrt(first)), np.sqrt(self.steps)) ** 2
        return {
            "none": np.empty(0, dtype=np.int64),
            "fixed": np.unique(fixed.astype(np.int64)),
            "sqrt": roots.astype(np.int64),
        }


@dataclass(frozen=True)
class Jump:
    """One recovery: distance of each layer's weights from where they were, and the path since its version."""

    scenario: str
    step: int
    distance: Floats
    path: Floats


@dataclass(frozen=True)
class RegretCurves:
    """Values at `at`, shape (points,), for each scenario: regret, and the bound of the added term."""

    at: npt.NDArray[np.int64]
    regret: Floats
    bound: Floats
    jumps: tuple[Jump, ...]
    num_failures: dict[str, int]

    def rows(self) -> list[dict[str, float | int]]:
        """One row for each T."""
        rows: list[dict[str, float | int]] = []
        for place, step in enumerate(self.at.tolist()):
            row: dict[str, float | int] = {"step": step}
            for index, name in enumerate(SCENARIOS):
                row[f"average_{name}"] = float(self.regret[index, place] / step)
                row[f"added_{name}"] = float(self.regret[index, place] - self.regret[0, place])
                row[f"bound_{name}"] = float(self.bound[index, place])
            rows.append(row)
        return rows


class _Learner:
    """Adam's state of all scenarios at once: shape (scenarios, layers, width); a ring of the last states."""

    def __init__(self, problem: Problem) -> None:
        shape = (len(SCENARIOS), _LAYERS, _WIDTH)
        self.w, self.m, self.v = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self.path = np.zeros((len(SCENARIOS), _LAYERS))
        self._problem = problem
        self._ring = np.zeros((problem.s_max + 1, 3, *shape))
        self._paths = np.zeros((problem.s_max + 1, len(SCENARIOS), _LAYERS))

    def step(self, t: int, gradient: Floats) -> None:
        problem = self._problem
        beta_1 = problem.beta_1 * problem.decay ** (t - 1)
        self.m = beta_1 * self.m + (1 - beta_1) * gradient
        self.v = problem.beta_2 * self.v + (1 - problem.beta_2) * gradient**2
        update = problem.alpha / np.sqrt(t) * self.m / (np.sqrt(self.v) + 1e-8)
        self.w = self.w - update
        self.path = self.path + np.linalg.norm(update, axis=2)
        self._keep(t)

    def _keep(self, t: int) -> None:
        slot = t % len(self._ring)
        self._ring[slot] = self.w, self.m, self.v
        self._paths[slot] = self.path

    def recover(self, scenario: int, t: int, ages: npt.NDArray[np.int64]) -> tuple[Floats, Floats, Floats]:
        """Each layer back to its version; returns distances, paths D_l, and the old and new (w, v)."""
        before = np.stack([self.w[scenario], self.v[scenario]])
        path = np.zeros(_LAYERS)
        for layer, age in enumerate(ages.tolist()):
            slot = (t - age) % len(self._ring)
            for values, saved in zip((self.w, self.m, self.v), self._ring[slot], strict=True):
                values[scenario, layer] = saved[scenario, layer]
            path[layer] = self.path[scenario, layer] - self._paths[slot, scenario, layer]
        after = np.stack([self.w[scenario], self.v[scenario]])
        self._keep(t)
        return np.linalg.norm(after[0] - before[0], axis=1), path, np.stack([before, after])


def run(problem: Problem, shown: Callable[[int, int], None] | None = None) -> RegretCurves:
    """Learns through all steps in all scenarios; see the head of this file."""
    rows = np.random.default_rng([problem.seed, 1])
    draws = np.random.default_rng([problem.seed, 2])
    truth = rows.standard_normal(_LAYERS * _WIDTH)
    at = np.unique(np.geomspace(4 * problem.s_max, problem.steps, _POINTS).astype(np.int64))
    failures = {name: set(steps.tolist()) for name, steps in problem.failures().items()}
    learner, best = _Learner(problem), _BestInHindsight(len(truth))
    loss, jumps, sizes = np.zeros(len(SCENARIOS)), list[Jump](), list[tuple[int, int, Floats]]()
    regret, farthest = np.zeros((len(SCENARIOS), len(at))), 0.0
    for t in range(1, problem.steps + 1):
        x = rows.standard_normal(len(truth))
        x /= np.linalg.norm(x)
        y = float(x @ truth) + _NOISE * rows.standard_normal()
        error = learner.w.reshape(len(SCENARIOS), -1) @ x - y
        loss += error**2 / 2
        best.add(x, y)
        learner.step(t, error[:, None, None] * x.reshape(_LAYERS, _WIDTH))
        farthest = max(farthest, float(np.abs(learner.w.reshape(len(SCENARIOS), -1) - truth).max()))
        for index, name in enumerate(SCENARIOS):
            if t in failures[name]:
                ages = draws.integers(0, problem.s_max + 1, _LAYERS)
                distance, path, states = learner.recover(index, t, ages)
                jumps.append(Jump(name, t, distance, path))
                sizes.append((index, t, states))
        place = int(np.searchsorted(at, t))
        if place < len(at) and at[place] == t:
            regret[:, place] = loss - best.loss()
            if shown is not None:
                shown(t, problem.steps)
    bound = _bounds(problem, at, sizes, farthest)
    counts = {name: len(steps) for name, steps in failures.items()}
    return RegretCurves(at, regret, bound, tuple(jumps), counts)


class _BestInHindsight:
    """min_w of the summed losses, from the normal equations."""

    def __init__(self, width: int) -> None:
        self._gram, self._cross, self._square = np.zeros((width, width)), np.zeros(width), 0.0

    def add(self, x: Floats, y: float) -> None:
        self._gram += np.outer(x, x)
        self._cross += x * y
        self._square += y * y

    def loss(self) -> float:
        weights = np.linalg.lstsq(self._gram, self._cross, rcond=None)[0]
        return float(self._square - self._cross @ weights) / 2


def _bounds(
    problem: Problem, at: npt.NDArray[np.int64], sizes: list[tuple[int, int, Floats]], farthest: float
) -> Floats:
    """Sum over the recoveries up to each T of the term in the head of this file: (scenarios, points)."""
    bound = np.zeros((len(SCENARIOS), len(at)))
    for index, t, ((w, v), (new_w, new_v)) in sizes:
        root, new_root = np.sqrt(v), np.sqrt(new_v)
        moved = np.maximum(root, new_root) * 2 * farthest * np.abs(new_w - w)
        term = (np.abs(new_root - root) * farthest**2 + moved).sum()
        bound[index, at >= t] += np.sqrt(t) / (2 * problem.alpha * (1 - problem.beta_1)) * term
    return bound
