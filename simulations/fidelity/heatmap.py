"""Figure 2: drift of every layer over the steps of a run, back to 0 at each save."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

from app.measure.fidelity.spec import Length, Outcome, RunSpec
from simulations.fidelity.experiments import CHECKPOINT
from simulations.fidelity.figures import accumulated
from simulations.pictures import draw_heat_map
from simulations.trace import read_trace

HEATMAP = "heatmap"


class Runs(Protocol):
    """Who makes runs."""

    folder: Path

    def run(self, specs: Sequence[RunSpec], keep: bool = False) -> list[Outcome]:
        """The outcomes, in the order of the specs."""
        ...


def draw_heatmap(lab: Runs, out: Path, length: Length, pictures: bool) -> dict[str, Any]:
    """Makes one run without failures and draws what its session recorded.

    Returns:
        Content of `fidelity.json`; what compares runs is empty, since nothing failed.
    """
    spec = RunSpec(seed=0, length=length, checkpoint={**CHECKPOINT, "drift": {"sample": "exact"}})
    run = lab.folder / f"run-{spec.key}"
    if not run.is_dir():  # the outcome alone does not show the layers
        (lab.folder / f"{spec.key}.json").unlink(missing_ok=True)
    (outcome,) = lab.run([spec], keep=True)
    trace = read_trace(str(run))
    drift = accumulated(trace.delta, trace.written)
    if pictures:
        draw_heat_map(drift.T, trace.names, out / "heatmap", int(trace.steps[0]))
    after = trace.steps > trace.config.warmup_steps
    return {
        "experiment": HEATMAP,
        "final_loss_deviation": [],
        "fraction_of_improvement_lost": None,
        "seed_spread": None,
        "lost_steps": [],
        "layers": {
            name: {
                "mean_update": float(trace.delta[after, column].mean()),
                "largest_drift": float(drift[after, column].max()),
                "writes": int(trace.written[after, column].sum()),
            }
            for column, name in enumerate(trace.names)
        },
        "conditions": {
            "length": length.model_dump(),
            "checkpoint": spec.checkpoint,
            "parameters": outcome.num_parameters,
            "step_s": outcome.step_s,
        },
    }
