"""[pure] Where a run stopped: the last step known to be complete, how it is known, and its trainer state."""

from dataclasses import dataclass
from itertools import pairwise

from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.lineage import Lineage
from layercheck.errors import NoPlanError
from layercheck.manifest import AttemptRecord, Commit, FailSource, TrainerState


@dataclass(frozen=True, slots=True)
class Failure:
    """t_fail, how it is known, and the trainer state of that step."""

    step: int
    source: FailSource
    trainer_state: TrainerState


def newest(facts: StoreFacts, lineage: Lineage, held: list[Commit]) -> Failure:
    """t_fail = max(r_A, newest heartbeat of A, newest live commit); no older attempt's heartbeat counts.

    What all ranks have sealed in memory is done as well, also if the word of it died with rank 0.
    """
    since = facts.newest.r_b if facts.newest else 0
    known = [failure for failure in _known_steps(facts, lineage) if failure.step >= since]
    known += [Failure(e.event.step, "memory", e.trainer_state) for e in held if e.event.step >= since]
    if not known:
        raise NoPlanError(
            f"run {facts.run.name} holds no trainer state: use another run name", run=facts.run.name
        )
    return max(known, key=lambda failure: failure.step)  # of equals the first: heartbeat, commit, record


def up_to(facts: StoreFacts, lineage: Lineage, at_step: int, reached: int) -> Failure:
    """The newest step up to `at_step` that could have been gone on from."""
    if at_step > reached:
        raise NoPlanError(
            f"run {facts.run.name} has come to step {reached}, not to {at_step} (steps that a roll-back has "
            "undone do not count): use an earlier --at-step",
            run=facts.run.name,
            step=reached,
        )
    known = [failure for failure in _known_steps(facts, lineage) if failure.step <= at_step]
    if not known:
        raise NoPlanError(
            f"run {facts.run.name} holds no trainer state up to step {at_step}: use a later --at-step",
            run=facts.run.name,
            step=at_step,
        )
    return max(known, key=lambda failure: failure.step)


def _known_steps(facts: StoreFacts, lineage: Lineage) -> list[Failure]:
    """Every step of this lineage whose trainer state is kept."""
    attempt = facts.newest
    known: list[Failure] = []
    if attempt is not None and (beat := facts.progress.get(attempt.attempt)) is not None:
        source: FailSource = "live" if facts.live_attempt == attempt.attempt else "journal"
        known.append(Failure(beat.step, source, beat.trainer_state))
    known += [Failure(c.event.step, "commit", c.trainer_state) for c in facts.live_commits(lineage)]
    for link in lineage.links:
        record = facts.attempts.get(link.attempt)
        undone = link.r_b > lineage.rolled_back_to(link.attempt)
        if record is not None and record.trainer_state and not undone:
            known.append(Failure(record.r_b, "journal", record.trainer_state))
    return known


def rolled_back_from(facts: StoreFacts, begun: AttemptRecord | None, failure: Failure) -> Failure:
    """For an attempt that began by a roll-back, how far the attempts before it had come."""
    later = begun.lineage if begun else ()
    for link, successor in reversed(list(pairwise(later))):
        record, beat = facts.attempts.get(link.attempt), facts.progress.get(link.attempt)
        if begun is not None and record is not None and record.token == begun.token:
            continue  # given up for a better plan before it made a step
        journaled = max(beat.step if beat else -1, link.r_b)
        source: FailSource = "commit" if successor.saw_step > journaled else "journal"
        return Failure(max(journaled, successor.saw_step, failure.step), source, {})
    return failure
