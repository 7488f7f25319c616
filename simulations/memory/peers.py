"""[pure] Other methods as arms beside LayerCheck's, with the settings of `measure methods` at every step.

`none` is stock DeepSpeed: stock groups, no session. The others save from engines with layer groups, and these
alone change a step, so what saving adds is told by `IDLE`: the same engine and session, which never saves.
"""

from collections.abc import Sequence

from simulations.comparison.arms import METHODS, QUICK, REFERENCE, check_methods, steady_arms

IDLE = "methods, nothing saved"
USUAL_PEERS = ("gemini", "checkfreq", "lowdiff_dense")
"""With DeepSpeed or DCP a step takes 1.5 to 2 times as long, and the run by so much longer."""
_NEVER = 1_000_000_000


def peers_of(methods: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Arm -> its `--set` items: `IDLE`, `none`, and these methods in their regime `every_step`.

    Raises:
        ConfigError: there is no such method.
    """
    others = [method for method in check_methods(methods) if method != "layercheck"]
    arms = {arm.method: arm.settings for arm in steady_arms(METHODS, QUICK) if "every_step" in arm.regimes}
    idle = (*arms["checkfreq"], f"checkpoint.baseline.checkfreq.interval_steps={_NEVER}")
    return {IDLE: idle} | {method: arms[method] for method in others}


def base_of(arm: str) -> str:
    """The arm that an arm of `peers_of` is compared with."""
    return arm if arm == REFERENCE else IDLE
