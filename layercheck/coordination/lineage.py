"""Which versions count for an attempt (I15). Pure.

Attempts form a chain: each begins where its predecessor was known to have come (`r_b`) and remembers the
newest commit that it saw of it. What a predecessor committed later, or what lies beyond a roll-back, belongs
to a history that nobody trained on: mixing it in would join weights of two different runs.
"""

from dataclasses import dataclass
from functools import cached_property

from layercheck.manifest import LineageLink

ENDLESS = 2**62
"""Stands for "no limit" where steps are compared."""


@dataclass(frozen=True)
class Lineage:
    """The chain of one attempt, oldest first; empty before the first attempt."""

    links: tuple[LineageLink, ...] = ()

    @property
    def attempt(self) -> int:
        """The attempt whose chain this is, 0 for none."""
        return self.links[-1].attempt if self.links else 0

    def extended(self, attempt: int, r_b: int, saw_step: int) -> "Lineage":
        """The chain of a successor."""
        link = LineageLink(attempt=attempt, r_b=r_b, predecessor=self.attempt, saw_step=saw_step)
        return Lineage((*self.links, link))

    def is_live(self, step: int, attempt: int) -> bool:
        """True if a version (step, attempt) belongs to this history."""
        return step <= self._ceilings.get(attempt, -1)

    def rolled_back_to(self, attempt: int) -> int:
        """Smallest step at which a later attempt began: what `attempt` did beyond it has been undone."""
        return min((link.r_b for link in self.links if link.attempt > attempt), default=ENDLESS)

    def last_restart(self, attempt: int, until: int) -> int:
        """Largest step at which an attempt after `attempt` began, not beyond `until`; 0 if there is none."""
        return max(
            (link.r_b for link in self.links if attempt < link.attempt and link.r_b <= until), default=0
        )

    @cached_property
    def _ceilings(self) -> dict[int, int]:
        """Attempt -> newest step of it that counts."""
        ceilings: dict[int, int] = {}
        limit, saw, expected = ENDLESS, ENDLESS, self.attempt
        for link in reversed(self.links):
            if link.attempt != expected:
                break  # a gap: nothing is known of what lies before it
            ceilings[link.attempt] = min(limit, saw)
            limit, saw, expected = min(limit, link.r_b), link.saw_step, link.predecessor
        return ceilings
