"""What a validation came to: `validation.json`, and a table for a person."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from simulations.validation.figures import Measured, Simulated

_SAME_MACHINE = 0.1
"""Steps of the two runs may differ by this part; beyond it something else kept the machine busy."""


@dataclass(frozen=True, slots=True)
class Row:
    """One method. `calibrated_t_iter_s`: useful seconds of a step in the run that gave the costs."""

    measured: Measured
    simulated: Simulated
    calibrated_t_iter_s: float

    @property
    def difference_points(self) -> float:
        """Simulated less measured ETTR, in points of 100."""
        return 100 * (self.simulated.ettr - self.measured.ettr)

    @property
    def is_disturbed(self) -> bool:
        """Whether the machine was not as fast in one of the two runs as in the other."""
        return abs(self.measured.t_iter_s / self.calibrated_t_iter_s - 1) > _SAME_MACHINE

    def is_within(self, points: float) -> bool:
        """Whether they differ by no more than so many points."""
        return abs(self.difference_points) <= points

    def content(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "measured": asdict(self.measured),
            "simulated": asdict(self.simulated),
            "calibrated_t_iter_s": self.calibrated_t_iter_s,
            "disturbed": self.is_disturbed,
            "difference_points": self.difference_points,
        }


def write_json(
    path: Path, length: Any, planned_s: Sequence[float], seed: int, rows: Mapping[str, Row]
) -> None:
    """Writes `validation.json`; `length` is a dataclass, `planned_s` when the kills were to be."""
    methods = {name: row.content() for name, row in rows.items()}
    content = {**asdict(length), "seed": seed, "planned_s": list(planned_s), "methods": methods}
    path.write_text(json.dumps(content, indent=2) + "\n")


def describe(rows: Mapping[str, Row]) -> str:
    """A table of all methods: ETTR in % with its standard error."""
    lines = [
        "",
        f"{'method':<20}{'kills':>6}{'minutes':>9}{'kept steps':>12}{'measured':>17}{'simulated':>17}"
        f"{'difference':>12}",
    ]
    for name, row in rows.items():
        measured, simulated = row.measured, row.simulated
        lines.append(
            f"{name:<20}{len(measured.kills_s):>6}{measured.kills_s[-1] / 60:>9.1f}"
            f"{sum(measured.kept_steps):>12}{_percent(measured):>17}{_percent(simulated):>17}"
            f"{row.difference_points:>+12.2f}"
        )
    lines += [
        "",
        "ETTR in % +- its standard error: of the cycles measured, of the recoveries that the costs come from",
    ]
    lines += [
        f"{name}: a step took {row.calibrated_t_iter_s:.3f} s in the run of the costs and "
        f"{row.measured.t_iter_s:.3f} s in the run with failures: the machine was busy, run this again"
        for name, row in rows.items()
        if row.is_disturbed
    ]
    return "\n".join(lines)


def _percent(one: Measured | Simulated) -> str:
    return f"{100 * one.ettr:.2f} +- {100 * one.standard_error:.2f}"
