"""A run whose process is really killed, and goes on in another one, is the in-process one bit for bit."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from app.measure.fidelity.spec import RunSpec
from tests.harness import run_ranks
from tests.integration.test_fidelity_runs import CHECKPOINT, LENGTH, prepare

KILLED_AT = 14
WRITER_IS_IDLE_S = 2.0
COMMITTED_S = 0.25
"""Pause after each step. A layer in flight is not chosen again, so a commit that outlasts an interval of four
steps would change what is saved."""
SPEC = RunSpec(
    # No layer is near its limit, so that nothing depends on how long a commit takes.
    seed=1, length=LENGTH, checkpoint=CHECKPOINT | {"s_max": 64}, failures=(KILLED_AT,)
)  # fmt: skip


def _in_process(folder: str) -> list[tuple[int, float]]:
    from app.measure.fidelity import tuning

    prepare(folder)
    one_step = tuning.one_step

    def unhurried(*args: Any) -> Any:
        time.sleep(COMMITTED_S)
        return one_step(*args)

    tuning.one_step = unhurried  # type: ignore[assignment]
    return list(tuning.run_specs(0, folder, [SPEC], False)[0].evaluations)


class _Watch:
    """Evaluates as `Tuning` does; kills its process after a step if it is told to."""

    def __init__(self, config: Any, texts: Any, kill_at: int) -> None:
        from app.measure.fidelity.held_out import HeldOut

        self._held_out, self._kill_at = HeldOut(config, texts), kill_at
        self.engine: Any = None
        self.first_step = 0
        self.evaluations: list[tuple[int, float]] = []

    def built(self, engine: Any, for_recovery: bool) -> None:
        self.engine = engine

    def begun(self, point: Any) -> None:
        self.first_step = point.step

    def stepped(self, step: int) -> None:
        time.sleep(COMMITTED_S)
        if LENGTH.is_evaluated(step):
            self.evaluations.append((step, self._held_out.loss(self.engine)))

    def maybe_kill(self, rank: int, step: int) -> None:
        if step == self._kill_at:
            time.sleep(WRITER_IS_IDLE_S)
            os.kill(os.getpid(), signal.SIGKILL)


def _train(folder: str, kill_at: int) -> tuple[int, list[tuple[int, float]]]:
    from app.config import parse
    from app.measure.fidelity.regime import tuning_config
    from app.measure.fidelity.texts import write_texts
    from app.train_loop import train

    base, place = prepare(folder), Path(folder)
    texts = write_texts(place, LENGTH.train_rows, LENGTH.held_out_rows)
    settings = tuning_config(place, base, texts, SPEC).resolved()
    settings["run"]["name"] = "killed"
    config = parse(settings)
    watch = _Watch(config, texts, kill_at)
    train(config, rank=0, world_size=1, submission="one", faults=watch, witness=watch)
    return watch.first_step, watch.evaluations


@pytest.mark.slow
def test_a_run_that_was_really_killed_is_the_in_process_one_bit_for_bit(tmp_path: Path) -> None:
    expected = run_ranks(1, tmp_path, _in_process, str(tmp_path))[0]
    assert run_ranks(1, tmp_path, _train, str(tmp_path), KILLED_AT) == [None]
    ((first_step, evaluations),) = run_ranks(1, tmp_path, _train, str(tmp_path), 0)
    assert first_step == KILLED_AT + 1
    assert len(evaluations) >= 3
    assert evaluations == [one for one in expected if one[0] > KILLED_AT]
