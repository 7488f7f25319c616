"""Saves outside the policy's schedule: everything at once, and the last save of a run that is to end.

A last save has only the grace time that the announcement gave. Its states, all ranks together:
1. the reduced report of a step said that some rank will be ended in `grace_s` seconds; no rank has taken an
   event of this step.
2. each rank copies part after part and hands them to its writer. A rank whose copies get no staging memory in
   time loses that part for all; it leaves no collective out.
3. the ranks repeat the all-reduce until the newest part is committed, or nothing is on its way any more, or
   rank 0's clock says that the time is over. Whatever was committed counts.
4. the loop ends and closes the session. A crash anywhere here leaves the versions committed so far.
"""

import logging
import time
from collections.abc import Callable, Sequence

from layercheck.attempt import Attempt
from layercheck.decision import LayerWrite, PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.tracking.ledger import Ledger

log = logging.getLogger(__name__)


def everything(ledger: Ledger, step: int) -> PersistDecision:
    """A full event of now, outside the policy's schedule."""
    drift, ages = ledger.drift, ledger.ages(step)
    return PersistDecision(
        step,
        tuple(
            LayerWrite(name, "full", drift.get(name, 0.0), 0.0, ages.get(name, 0)) for name in ledger.full_set
        ),
    )


def save_before_end(
    opened: Attempt,
    parts: Sequence[PersistDecision],
    grace_s: float,
    save: Callable[[PersistDecision, int], int],
    poll: Callable[[float], DriftReport],
) -> tuple[PersistDecision, int]:
    """Saves the parts, in their order, and waits for them. A collective.

    Args:
        opened: the attempt; knows afterwards that it was preempted and until when.
        parts: what to save.
        grace_s: seconds from now; the same on all ranks.
        save: takes one part under the number given, and returns this rank's bytes.
        poll: one look at the news, see `Exchange.poll`.

    Returns:
        What is known to be committed, and the bytes that this rank handed over.
    """
    opened.preempted = True
    opened.ends_at = deadline = time.monotonic() + grace_s
    numbered = [(opened.next_part(), part) for part in parts]
    nbytes = sum(save(part, number) for number, part in numbered)
    done, lost = _await(opened.step, numbered[-1][0] if numbered else 0, lambda: poll(deadline))
    # Which part was lost is not told, only that one was: then nothing here is counted as saved.
    saved = () if lost else tuple(part for number, part in numbered if number <= done)
    opened.ledger.saved_parts(saved)
    if opened.link is not None:
        log.warning("%s", _in_words(opened, len(saved), len(parts), grace_s, lost))
    return PersistDecision(opened.step, tuple(write for part in saved for write in part.writes)), nbytes


def _await(step: int, last: int, poll: Callable[[], DriftReport]) -> tuple[int, bool]:
    """Number of the newest part of this step that is committed, and whether a part was lost."""
    done, lost = 0, False
    while done < last:
        report = poll()
        if report.committed_step == step:
            done = report.committed_part
        lost = lost or step in report.lost_steps
        if report.errors or (lost and report.backlog == 0):
            break
    return done, lost


def _in_words(opened: Attempt, saved: int, parts: int, grace_s: float, lost: bool) -> str:
    why = opened.signals.came or "announced by another rank or the program"
    if lost:
        what = "a part was lost (see above); the next start takes the newest version of every layer"
    elif saved == parts:
        what = f"all layers are saved in {parts} parts: the next start loses nothing"
    else:
        what = f"time for {saved} of {parts} parts only; the other layers are older"
    return f"preempted at step {opened.step} ({why}, {grace_s:.1f} s of grace): {what}"
