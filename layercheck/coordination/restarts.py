"""Guards against restarts that cannot help (I13). Pure."""

from layercheck.coordination.facts import StoreFacts
from layercheck.errors import RestartLoopError
from layercheck.manifest import AttemptRecord

MAX_FRUITLESS = 3


def check_progress(facts: StoreFacts, submission: str) -> None:
    """Refuses one more attempt after three in a row that recovered and made no step.

    Only attempts of the same submission count: a person who submits again has changed something, or wants to
    see the error once more.

    Raises:
        RestartLoopError: names the step that no attempt got past.
    """
    fruitless = 0
    record = facts.newest
    while record is not None and record.submission == submission:
        receipt = facts.receipts.get(record.attempt)
        if receipt is not None:
            if _reached(facts, record.attempt) > receipt.get("t_fail", -1):
                return
            fruitless += 1
        elif not _same_life(facts, record):
            return
        if fruitless == MAX_FRUITLESS:
            raise RestartLoopError(
                f"run {facts.run.name}: {fruitless} attempts in a row recovered and ended without a step "
                f"beyond {receipt and receipt.get('t_fail')}: see the workers' error; submit again to retry",
                run=facts.run.name,
                attempts=fruitless,
            )
        record = facts.attempts.get(record.lineage[-1].predecessor)


def _reached(facts: StoreFacts, attempt: int) -> int:
    beat = facts.progress.get(attempt)
    return max(beat.step if beat else -1, facts.newest_commit_step(attempt))


def _same_life(facts: StoreFacts, record: AttemptRecord) -> bool:
    """True if the attempt was given up for a better plan within one start of the workers."""
    return any(
        other.token == record.token and other.attempt > record.attempt for other in facts.attempts.values()
    )


def mode_after_poison(facts: StoreFacts, mode: str) -> str:
    """`uniform` if the newest attempt's plan led to a non-finite state, else the mode asked for.

    Raises:
        RestartLoopError: the uniform plan led there too.
    """
    newest = facts.newest
    if newest is None or newest.attempt not in facts.bad_plans:
        return mode
    if newest.mode == "uniform":
        raise RestartLoopError(
            f"run {facts.run.name}: the loss became non-finite after a composite and after a uniform "
            "recovery: the state was bad before; lower the learning rate, or recover an earlier step",
            run=facts.run.name,
        )
    return "uniform"


def is_poison(reason: str) -> bool:
    """True if an attempt's last words say that its state was not finite."""
    return any(mark in reason for mark in ("NonFiniteStateError", "non-finite", "not finite"))
