"""[pure] Where every second of a simulated stretch of time went."""

from dataclasses import dataclass, fields

from layercheck.errors import LayerCheckError


@dataclass(frozen=True, slots=True)
class Booked:
    """Seconds by cause; they add up to the time simulated.

    Attributes:
        useful_s: steps whose result was kept.
        stall_s: visible stalls of commits that came to their end.
        rework_s: steps (whole and broken ones) and stalls that a failure threw away: they are done again.
        detect_s, restart_s, load_s, reconstruct_s: recoveries, also those that another failure cut off.
        repair_s: waiting for a repair before a recovery could begin.
        open_s: since the last commit when the horizon came: neither kept nor lost, not part of the ratio.
        num_failures: failures.
        num_commits: commits.
    """

    useful_s: float = 0.0
    stall_s: float = 0.0
    rework_s: float = 0.0
    detect_s: float = 0.0
    restart_s: float = 0.0
    load_s: float = 0.0
    reconstruct_s: float = 0.0
    repair_s: float = 0.0
    open_s: float = 0.0
    num_failures: int = 0
    num_commits: int = 0

    @property
    def total_s(self) -> float:
        """All seconds."""
        return float(sum(getattr(self, name) for name in SECONDS))

    @property
    def counted_s(self) -> float:
        """Seconds that the ratio is taken of."""
        return self.total_s - self.open_s

    @property
    def ettr(self) -> float:
        """Effective training time ratio."""
        return self.useful_s / self.counted_s if self.counted_s > 0 else 0.0

    def check(self, horizon_s: float) -> "Booked":
        """Returns itself.

        Raises:
            LayerCheckError: a second was booked twice, or not at all, or with a negative sign.
        """
        negative = [name for name in SECONDS if getattr(self, name) < -1e-6 * horizon_s]
        if negative or abs(self.total_s - horizon_s) > 1e-6 * horizon_s:
            raise LayerCheckError(
                f"booked {self.total_s!r} s of {horizon_s!r} s; negative: {negative}: {self}"
            )
        return self


SECONDS = tuple(field.name for field in fields(Booked) if field.name.endswith("_s"))
"""Names of the causes."""
