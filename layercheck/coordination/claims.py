"""Claiming an attempt: from what the store holds to a record that fences off everybody older."""

from dataclasses import dataclass, replace

from layercheck.config import LayerCheckConfig
from layercheck.coordination import journal, restarts
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.timer import Timer
from layercheck.errors import FencedError
from layercheck.manifest import AttemptRecord, RecoveryPlan
from layercheck.persistence.storage import Storage


@dataclass(frozen=True, slots=True)
class Claim:
    """An attempt that is ours. `facts` hold its record; `plan` is None on a fresh run."""

    facts: StoreFacts
    record: AttemptRecord
    plan: RecoveryPlan | None


@dataclass(frozen=True, slots=True)
class Claimant:
    """Who asks for an attempt."""

    token: str
    submission: str
    world_size: int
    mode: str


def claim_next(
    storage: Storage, facts: StoreFacts, config: LayerCheckConfig, who: Claimant, timer: Timer
) -> Claim | None:
    """Claims the number after the highest; None if somebody else got it, and the store has to be read again.

    Raises:
        RestartLoopError: more of the same cannot help.
        NoPlanError: the store holds a run and yields no plan.
    """
    restarts.check_progress(facts, who.submission)
    who = replace(who, mode=restarts.mode_after_poison(facts, who.mode))
    return _claim(storage, facts, who, make_plan(facts, _request(config, who.world_size, who.mode)), timer)


def reclaim(
    storage: Storage, facts: StoreFacts, config: LayerCheckConfig, token: str, timer: Timer
) -> Claim | None:
    """What a token claimed before, its plan made once more; None if it claimed nothing yet.

    A plan that now has to roll back further than the record says (a shard turned out bad) gets the next
    number: under the old one, later readers would count versions of steps that have been undone.

    Raises:
        FencedError: a newer attempt of somebody else exists.
    """
    mine = [record for record in facts.attempts.values() if record.token == token]
    if not mine:
        return None
    record = max(mine, key=lambda record: record.attempt)
    if facts.highest_attempt != record.attempt:
        raise FencedError(f"attempt {record.attempt} is fenced off by a newer one", attempt=record.attempt)
    if not journal.confirm_claim(storage, record, timer):
        return None
    plan = make_plan(facts, _request(config, record.world_size, record.mode), begun=record)
    if plan is None or plan.resume_step - 1 >= record.r_b:
        return Claim(facts, record, plan)
    who = Claimant(token, record.submission, record.world_size, record.mode)
    claim = _claim(storage, facts, who, plan, timer)
    if claim is None:
        raise FencedError(f"attempt {record.attempt} is fenced off by a newer one", attempt=record.attempt)
    return claim


def is_ours(storage: Storage, record: AttemptRecord) -> bool:
    """Reads the claim again: False once a newer one exists, or a rival's token stands in ours."""
    if max(journal.attempt_numbers(storage), default=0) != record.attempt:
        return False
    found = journal.read_attempt(storage, record.attempt)
    return found is None or found.token == record.token


def _claim(
    storage: Storage, facts: StoreFacts, who: Claimant, plan: RecoveryPlan | None, timer: Timer
) -> Claim | None:
    """Creates the record, complete, in one act."""
    attempt = facts.highest_attempt + 1
    r_b = plan.resume_step - 1 if plan else 0
    saw = facts.newest_commit_step(facts.newest.attempt) if facts.newest else -1
    record = AttemptRecord(
        attempt=attempt,
        token=who.token,
        submission=who.submission,
        world_size=who.world_size,
        mode=who.mode,
        r_b=r_b,
        trainer_state=plan.trainer_state if plan else {"step": 0},
        lineage=facts.lineage.extended(attempt, r_b, saw).links,
    )
    if not journal.claim_attempt(storage, record, timer):
        return None
    attempts = facts.attempts | {attempt: record}
    return Claim(replace(facts, attempts=attempts, highest_attempt=attempt, live_attempt=0), record, plan)


def _request(config: LayerCheckConfig, world_size: int, mode: str) -> PlanRequest:
    return PlanRequest(world_size=world_size, mode=mode, strict_max_age=config.strict_max_age)
