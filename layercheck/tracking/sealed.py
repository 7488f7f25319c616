"""[pure] Which copies in the memory of the nodes are known to be whole: what a dead worker would leave.

A copy is whole when every rank has sealed its part. A report of a later step tells so: no rank has anything
left to write, and none left a copy out. Where one did, nothing is known any more of the layers on their way:
the other ranks have sealed theirs, and may have given up the copies before.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Self

from layercheck.drift_report import DriftReport
from layercheck.manifest import RecoveryPlan


@dataclass(slots=True)
class Sealed:
    """Fed by the reduced reports alone, so it says the same on every rank.

    Attributes:
        replicas: copies on other nodes, which nobody confirms.
        step: layer -> step of its newest copy that all ranks have sealed.
        left_out: copies that ranks have left out in this attempt, each rank's part counted.
    """

    replicas: int = 0
    step: dict[str, int] = field(default_factory=dict)
    left_out: int = 0
    _taken: dict[int, tuple[str, ...]] = field(default_factory=dict)

    @classmethod
    def since(cls, replicas: int, plan: RecoveryPlan | None) -> Self:
        """An attempt that begins: what it got from memory is still there."""
        layers = plan.layers if plan is not None else ()
        return cls(replicas, {one.layer: one.memory.step for one in layers if one.memory is not None})

    def take(self, step: int, names: Iterable[str]) -> None:
        """These layers are copied to memory now, whether the storage gets them too or not."""
        if taken := tuple(names):
            self._taken[step] = self._taken.get(step, ()) + taken

    def observe(self, report: DriftReport) -> None:
        """Takes in one report; what was taken after its step it says nothing of."""
        self.left_out += report.left_out
        if report.left_out == 0 and report.backlog > 0:
            return
        for step in sorted(step for step in self._taken if step < report.step):
            for name in self._taken.pop(step):
                if report.left_out:
                    self.step.pop(name, None)
                else:
                    self.step[name] = step

    def to_state(self) -> dict[str, Any]:
        """JSON values that ride in the heartbeat; `coordination/deaths.py` reads them."""
        return {"replicas": self.replicas, "layers": dict(self.step)}
