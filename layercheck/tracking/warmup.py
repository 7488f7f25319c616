"""[pure] What a person is told of the warm-up: in it a restart goes back, after it a restart goes on."""

from layercheck.config import LayerCheckConfig
from layercheck.tracking.calibrate import expected_interval
from layercheck.tracking.ledger import Ledger


def told_at_the_start(done: int, config: LayerCheckConfig) -> str | None:
    """The line for an attempt that begins in the warm-up; None after it.

    Args:
        done: last step that counts as done when the attempt begins.
        config: settings of the run.
    """
    if done >= config.warmup_steps:
        return None
    return (
        f"warm-up until step {config.warmup_steps}: a restart before its end goes back to the newest full "
        f"copy, one every {config.warmup_full_every} steps (warmup_steps, warmup_full_every)"
    )


def told_at_the_end(step: int, ledger: Ledger) -> str | None:
    """The line for the step at which K0 was fixed; None while there is no K0."""
    if ledger.k0 is None or ledger.lr_ref is None:
        return None
    interval = expected_interval(
        ledger.k0, ledger.meter, ledger.config, ledger.layer_map.trainable, ledger.lr_ref
    )
    return (
        f"warm-up over at step {step}: K0 = {ledger.k0:.3g} at learning rate {ledger.lr_ref:.3g}, a mean "
        f"interval of {interval:.3g} steps between two saves of a layer; from its full copy on, a restart "
        "goes on where training stopped"
    )
