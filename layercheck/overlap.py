"""What runs beside training: copies always; on an accelerator decisions too, one step later."""

from dataclasses import dataclass

from layercheck.persistence.copier import Copier, StreamCopier, ThreadCopier
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


def overlap_of(zero3: Zero3Engine, wait_s: float) -> Overlap:
    """Where the fp32 partitions live on a device the host never waits for it.

    Args:
        zero3: the engine.
        wait_s: limit of the host's wait for a copy in its own memory.
    """
    if zero3.on_accelerator:
        return Overlap(lag=1, copier=StreamCopier(zero3.sub_groups[0].flat.device))
    return Overlap(lag=0, copier=ThreadCopier(wait_s))
