"""[pure] What the engines need to know of a checkpointing method; nothing of where the figures come from."""

from dataclasses import dataclass, replace

from simulations.checks import not_negative, positive
from simulations.failures import KINDS


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from a failure to the first useful step, by phase; replayed steps are waste, not recovery."""

    detect_s: float = 0.0
    restart_s: float = 0.0
    load_s: float = 0.0
    reconstruct_s: float = 0.0

    @property
    def total_s(self) -> float:
        """R of the closed forms."""
        return self.detect_s + self.restart_s + self.load_s + self.reconstruct_s


@dataclass(frozen=True, slots=True)
class Method:
    """One method at one operating point.

    Attributes:
        t_iter_s: seconds of one training step without checkpointing.
        interval_steps: steps per commit.
        stall_s: visible stall per commit in seconds, its share of far copies included.
        recovery: for each of `KINDS`.
        far_every: commits per copy that survives the failures of `far_kinds`; 0 if every commit does.
        far_kinds: kinds of failure that destroy commits, so that the newest far copy has to do.
        far_stall_s: what a far copy stalls more than another commit.
        delay_s: from the end of the stall until a commit counts; a failure before that loses it.
    """

    name: str
    t_iter_s: float
    interval_steps: int
    stall_s: float
    recovery: tuple[Recovery, Recovery, Recovery]
    far_every: int = 0
    far_kinds: tuple[str, ...] = ()
    far_stall_s: float = 0.0
    delay_s: float = 0.0

    def __post_init__(self) -> None:
        positive(f"{self.name}.t_iter_s", self.t_iter_s)
        positive(f"{self.name}.interval_steps", self.interval_steps)
        not_negative(f"{self.name}.stall_s", self.stall_s)
        not_negative(f"{self.name}.delay_s", self.delay_s)
        not_negative(f"{self.name}.far_stall_s", self.far_stall_s)
        for kind, recovery in zip(KINDS, self.recovery, strict=True):
            for phase in ("detect_s", "restart_s", "load_s", "reconstruct_s"):
                not_negative(f"{self.name}.{kind}.{phase}", getattr(recovery, phase))

    @property
    def tau_s(self) -> float:
        """Useful seconds per commit."""
        return self.interval_steps * self.t_iter_s

    @property
    def cycle_s(self) -> float:
        """Seconds from commit to commit."""
        return self.tau_s + self.stall_s

    def recovery_s(self, mix: tuple[float, float, float]) -> float:
        """Mean recovery over a failure mix, in seconds."""
        return sum(part * recovery.total_s for part, recovery in zip(mix, self.recovery, strict=True))

    def at(self, interval_steps: int, stall_s: float | None = None) -> "Method":
        """The same method with another interval; far copies stay as many steps apart."""
        method = replace(self, interval_steps=interval_steps)
        if stall_s is not None:
            method = replace(method, stall_s=stall_s)
        if not self.far_every:
            return method
        return method.stored(max(1, round(self.far_every * self.interval_steps / interval_steps)))

    def stored(self, far_every: int) -> "Method":
        """The same method, which has far copies, with one of them every `far_every` commits."""
        more_s = self.far_stall_s * (1 / far_every - 1 / self.far_every)
        return replace(self, far_every=far_every, stall_s=self.stall_s + more_s)


def simple(name: str, tau_s: float, stall_s: float, recovery_s: float, interval_steps: int = 1) -> Method:
    """A method given by the three numbers of the closed forms; every kind of failure costs the same."""
    recovery = Recovery(restart_s=recovery_s)
    return Method(name, tau_s / interval_steps, interval_steps, stall_s, (recovery, recovery, recovery))
