"""The wait of I1: all ranks block while one more step would leave a layer older than `s_max`.

Every rank sees the same reports, so all of them go on, or end, after the same look.
"""

import time
from collections.abc import Callable

from layercheck.attempt import Attempt
from layercheck.config import LayerCheckConfig
from layercheck.decision import PersistDecision
from layercheck.drift_report import DriftReport
from layercheck.errors import AgeBoundError
from layercheck.tracking.policy import decide


def wait_for_commits(
    opened: Attempt,
    step: int,
    config: LayerCheckConfig,
    save: Callable[[PersistDecision], object],
    poll: Callable[[float], DriftReport],
) -> bool:
    """Waits until no layer is at its limit any more. A collective.

    Args:
        opened: the attempt; its newest step is known to be clean and complete.
        step: the step that waits.
        config: settings.
        save: takes an event of this step.
        poll: one look at the news until a deadline (monotonic seconds), see `Exchange.poll`.

    Returns:
        True if a rank will be ended from outside meanwhile: then a last save is more urgent.

    Raises:
        AgeBoundError: nothing newer was committed within `storage_wait_s`, or nothing is on its way.
    """
    deadline = time.monotonic() + config.storage_wait_s
    while (decision := decide(opened.ledger.facts(step, opened.ledger.lr), config)).must_wait:
        # Not empty only if the event of an earlier step was lost while we waited.
        save(decision)
        if config.on_bound == "continue" and step > 0:
            opened.alert(f"the age bound s_max={config.s_max} is broken at step {step}")
            return False
        report = poll(deadline) if opened.ledger.versions.in_flight else None
        if report is not None and report.grace_s and step > 0:
            return True
        if report is None or report.errors:
            raise AgeBoundError(
                f"step {step}: a layer is s_max={config.s_max} steps old and nothing newer was "
                f"committed within storage_wait_s={config.storage_wait_s:g}, or its save was lost",
                step=step,
            )
    return False
