"""The attempts of a run, as a store tells them."""

from dataclasses import dataclass
from typing import Any

from layercheck.coordination.facts import StoreFacts
from layercheck.manifest import ENDED_WELL, AttemptRecord


@dataclass(frozen=True, slots=True)
class AttemptRow:
    """One life of the worker group. `ended` is None if it was cut off, or lives; `reached` its last step.

    `failed`: it was cut off, or ended by an error. `loss_before`: that of step `r_b`, where it is known.
    """

    number: int
    world_size: int
    r_b: int
    reached: int
    ended: str | None
    reason: str
    receipt: dict[str, Any] | None
    failed: bool
    loss_before: float | None = None


def lives_of(facts: StoreFacts) -> tuple[AttemptRow, ...]:
    """All attempts, in order."""
    rows = []
    newest = max(facts.attempts, default=0)
    for number, record in sorted(facts.attempts.items()):
        beat = facts.progress.get(number)
        ended = beat.ended if beat else None
        rows.append(
            AttemptRow(
                number=number,
                world_size=record.world_size,
                r_b=record.r_b,
                reached=max(record.r_b, beat.step if beat else 0, facts.newest_commit_step(number)),
                ended=ended,
                reason=beat.reason if beat else "",
                receipt=facts.receipts.get(number),
                failed=ended == "failed" if number == newest else ended not in ENDED_WELL,
                loss_before=_loss(record),
            )
        )
    return tuple(rows)


def _loss(record: AttemptRecord) -> float | None:
    """What a loop puts into its trainer state is its own affair: a loss is a number, or unknown."""
    found = record.trainer_state.get("loss")
    return float(found) if isinstance(found, int | float) else None
