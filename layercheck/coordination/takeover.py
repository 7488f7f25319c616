"""May a new submission take a run over? Only if nobody moves. No clocks of two machines are compared."""

from collections.abc import Callable

from layercheck.coordination import journal
from layercheck.coordination.timer import Timer
from layercheck.errors import RunIsLiveError
from layercheck.manifest import AttemptRecord, Progress
from layercheck.persistence.storage import Storage

_POLL_S = 1.0
_SAY_EVERY_S = 5.0
_SHORTEST_S = 0.01


def refuse_if_live(
    storage: Storage,
    newest: AttemptRecord,
    run_name: str,
    takeover_s: float,
    timer: Timer,
    say: Callable[[str], None],
) -> float:
    """Watches the progress file of another submission's attempt for `takeover_s` seconds.

    An attempt that says it has ended is not watched. A successor that it claims meanwhile is life, too.

    Returns:
        The seconds that it took.

    Raises:
        RunIsLiveError: it moved.
    """
    first = _look(storage, newest)
    if first[1] is not None and first[1].ended is not None:
        return 0.0
    begun = said = timer.clock()
    while (waited := timer.clock() - begun) < takeover_s:
        if timer.clock() - said >= _SAY_EVERY_S:
            said = timer.clock()
            say(
                f"run {run_name}: is attempt {newest.attempt} alive? watched {waited:.0f} of "
                f"takeover_s={takeover_s:g} s (--takeover, takeover=True of attach: without waiting)"
            )
        # A rest that rounding leaves would never pass on a clock that moves by what was slept.
        timer.sleep(min(_POLL_S, max(_SHORTEST_S, takeover_s - waited)))
        now = _look(storage, newest)
        if now == first:
            continue
        if now[1] is not None and now[1].ended is not None and now[0] == first[0]:
            return timer.clock() - begun
        step = now[1].step if now[1] is not None else newest.r_b
        raise RunIsLiveError(
            f"run {run_name} is live (step {step}, moving); end it or pass --takeover "
            "(takeover=True of attach)",
            run=run_name,
            step=step,
        )
    say(f"run {run_name}: attempt {newest.attempt} did not move for {takeover_s:g} s; taking over")
    return timer.clock() - begun


def _look(storage: Storage, newest: AttemptRecord) -> tuple[int, Progress | None]:
    highest = max(journal.attempt_numbers(storage), default=0)
    return highest, journal.read_progress(storage, newest.attempt)
