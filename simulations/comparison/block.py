"""[pure] What one block came to: the values between the runs and the figures, and their JSON form."""

from dataclasses import asdict, dataclass
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Written:
    """What became durable, bytes of all ranks.

    Attributes:
        steps: that it is the yield of.
        nbytes, events, layer_writes: saves of the method's own rhythm.
        aside_bytes, aside_events: full events and bases that come beside them.
    """

    steps: int
    nbytes: int
    events: int
    layer_writes: int
    aside_bytes: int = 0
    aside_events: int = 0


@dataclass(frozen=True, slots=True)
class Recovered:
    """Seconds of one recovery by phase.

    Attributes:
        detect_s, reschedule_s: until a worker is back at its first line; of `none`, all in `reschedule_s`.
        load_s: to find, read and check what is loaded.
        reconstruct_s: from these bytes to a state that can be trained on; LowDiff replays in it.
        replay_s: steps that were run again, without what the first step of a process takes longer.
        first_step_s: what that is.
        replayed_steps: how many were run again.
    """

    detect_s: float
    reschedule_s: float
    load_s: float
    reconstruct_s: float
    replay_s: float
    first_step_s: float
    replayed_steps: int

    @property
    def without_restart_s(self) -> float:
        """Load, reconstruction and replay: what differs between methods by design."""
        return self.load_s + self.reconstruct_s + self.replay_s

    @property
    def total_s(self) -> float:
        """All phases, from the death to where the run was."""
        return self.detect_s + self.reschedule_s + self.without_restart_s + self.first_step_s


@dataclass(frozen=True, slots=True)
class LayerInterval:
    """How often LayerCheck wrote a layer in the measured steps."""

    name: str
    numel: int
    writes: int


@dataclass(frozen=True, slots=True)
class Block:
    """One run.

    Attributes:
        arm, method, regimes: see `arms.Arm`; `number` is the repeat.
        step_s: seconds of each measured step, saving included.
        stall_s: the part of each for which training waited for a save.
        elapsed_s: from the first measured step's beginning to the last one's end.
        written: None for `none` and for killed runs.
        full_bytes: of one full state; 0 if the run has none.
        mean_age: parameters' mean steps since their last durable copy, None where nothing is saved.
        footprint_bytes: in the storage at the end.
        facts: figures of the method alone.
        layers: LayerCheck's.
        recovered: of a killed run.
    """

    arm: str
    method: str
    regimes: tuple[str, ...]
    number: int
    step_s: tuple[float, ...]
    stall_s: tuple[float, ...]
    elapsed_s: float
    written: Written | None = None
    full_bytes: int = 0
    mean_age: float | None = None
    footprint_bytes: int = 0
    facts: dict[str, float] | None = None
    layers: tuple[LayerInterval, ...] = ()
    recovered: Recovered | None = None

    @property
    def cycle_s(self) -> float:
        """Mean seconds from one step to the next."""
        return self.elapsed_s / len(self.step_s)

    @property
    def mean_interval(self) -> float:
        """Steps x bytes of the full state / bytes written, full events aside; 0 if nothing was written."""
        if self.written is None or not self.written.nbytes:
            return 0.0
        return self.written.steps * self.full_bytes / self.written.nbytes

    def fact(self, name: str) -> float:
        """A figure of the method alone, 0 if it has none of this name."""
        return (self.facts or {}).get(name, 0.0)

    def content(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    @classmethod
    def of(cls, content: dict[str, Any]) -> Self:
        """The block of its JSON values."""
        written, recovered = content["written"], content["recovered"]
        return cls(
            **{
                **content,
                "regimes": tuple(content["regimes"]),
                "step_s": tuple(content["step_s"]),
                "stall_s": tuple(content["stall_s"]),
                "written": None if written is None else Written(**written),
                "layers": tuple(LayerInterval(**layer) for layer in content["layers"]),
                "recovered": None if recovered is None else Recovered(**recovered),
            }
        )
