"""How far a session runs beside the device: not at all on a CPU, one step on an accelerator."""

from dataclasses import dataclass

from layercheck.persistence.copier import Copier, HostCopier, StreamCopier
from layercheck.zero3 import Zero3Engine


@dataclass(frozen=True, slots=True)
class Overlap:
    """Decides when the host waits.

    Attributes:
        lag: the decision of a step uses the reduced vector of so many steps before.
        copier: takes the bytes of the chosen layers.
    """

    lag: int
    copier: Copier


def overlap_of(zero3: Zero3Engine) -> Overlap:
    """Where the fp32 partitions live on a device the host never waits for it; elsewhere nothing is gained."""
    if zero3.on_accelerator:
        return Overlap(lag=1, copier=StreamCopier(zero3.sub_groups[0].flat.device))
    return Overlap(lag=0, copier=HostCopier())
