"""[pure] A run whose parts are killed, and what each of its recoveries lost; both have a JSON form."""

from collections.abc import Mapping
from typing import Any, Literal

from app.measure.fidelity.spec import Length, RunSpec
from app.section import Section

What = Literal["worker", "node", "cluster"]
"""One worker; all processes of one of two nodes; every process of the cluster, vaults and driver included."""


class KilledRun(Section):
    """A run on two workers: of the app's model `tiny` from scratch, or the fine-tuning of a trained one.

    Attributes:
        name: of the run, and of its folders.
        what: is killed, by SIGKILL.
        kills: the steps after which; increasing.
        moment: each kill comes at a random part of a step after that one, between these two.
        checkpoint: settings of the session, see `LayerCheckConfig`.
        seed: of the moments and of the choice of workers and nodes.
        run_seed: of a fine-tuning, the order of its data; that of `tiny` is always the same.
        base_steps: of the model that is fine-tuned, trained from scratch; None for `tiny`.
    """

    name: str
    what: What = "worker"
    kills: tuple[int, ...] = ()
    moment: tuple[float, float] = (0.0, 1.0)
    steps: int
    checkpoint: dict[str, Any]
    seed: int = 0
    run_seed: int = 0
    base_steps: int | None = None

    @property
    def tuning(self) -> RunSpec | None:
        """A fine-tuning as one of the fidelity experiments, whose model and texts it takes."""
        if self.base_steps is None:
            return None
        length = Length.of_killed(self.base_steps, self.steps)
        return RunSpec(seed=self.run_seed, length=length, checkpoint=self.checkpoint)


class Recovered(Section):
    """One recovery: where the run was, and what its receipt says.

    Attributes:
        killed_at: the last step that rank 0 had ended, saving included, when the kill came.
        t_fail, t_fail_source, resume_step, lost_steps, max_age, weighted_age: of the receipt.
        ages: layer -> age of its version; `lost`: steps of it that are lost, size-weighted in `lost_steps`.
        sources: layer -> memory, peer or storage.
        residuals: layers whose weights came from a residual.
        seconds: plan, fetch and install.
    """

    killed_at: int
    t_fail: int
    t_fail_source: str
    resume_step: int
    lost_steps: float
    max_age: int
    weighted_age: float
    ages: dict[str, int]
    lost: dict[str, float]
    sources: dict[str, str]
    residuals: tuple[str, ...]
    bad: int
    seconds: dict[str, float]

    @classmethod
    def of(cls, killed_at: int, receipt: Mapping[str, Any]) -> "Recovered":
        """From a receipt as it lies in the store."""
        layers = receipt["layers"]
        same = ("t_fail", "t_fail_source", "resume_step", "lost_steps", "max_age", "weighted_age")
        return cls(
            killed_at=killed_at,
            ages={layer["name"]: layer["age"] for layer in layers},
            lost={layer["name"]: layer["lost"] for layer in layers},
            sources={layer["name"]: layer.get("source") or "storage" for layer in layers},
            residuals=tuple(layer["name"] for layer in layers if layer["residual"] is not None),
            bad=len(receipt["bad"]),
            seconds={name: receipt[name] for name in ("plan_s", "fetch_s", "install_s")},
            **{name: receipt[name] for name in same},
        )


class Outcome(Section):
    """What became of a run.

    Attributes:
        layers: parameters of each.
        recoveries: one for each kill, in order.
        losses: of the last steps, in order.
        state: layer/rank -> hash of its part of the state after the last step, moments included.
        left: segment folders of the run in shared memory after its end.
        median_step_s: of all steps.
        held_out: of a fine-tuning, loss on rows that it never saw: of the base, and after the last step.
    """

    run: KilledRun
    layers: dict[str, int]
    recoveries: tuple[Recovered, ...]
    losses: tuple[float, ...]
    state: dict[str, str]
    left: int
    median_step_s: float
    held_out: tuple[float, float] | None = None
