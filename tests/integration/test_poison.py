"""A state that is not finite is never committed and ends the run with one error (I13)."""

from pathlib import Path
from typing import Any

import pytest

from tests import micro
from tests.harness import RankFailedError, run_ranks
from tests.integration.ranks import open_session

POISONED_AT = 12


def _poison_a_moment(storage: str) -> None:
    engine = micro.build()
    session = open_session(engine, storage, selection="full", target_interval=1)
    session.resume()
    zero3 = session._zero3
    for step in range(1, POISONED_AT + 1):
        if step == POISONED_AT and zero3.rank == 1:
            zero3.tensors(zero3.slices["layers.2"][0])["exp_avg"][0] = float("nan")
        loss = micro.train_step(engine, step)
        session.after_step(step, {"loss": loss})


def _report_a_nan_loss(storage: str) -> None:
    engine = micro.build()
    session = open_session(engine, storage, selection="full", target_interval=1)
    session.resume()
    for step in range(1, POISONED_AT + 1):
        loss = micro.train_step(engine, step)
        session.after_step(step, {"loss": float("nan") if step == POISONED_AT else loss})


@pytest.mark.parametrize(
    ("poison", "words"),
    [
        (_poison_a_moment, "step 12: layer layers.2 moved by a non-finite amount"),
        (_report_a_nan_loss, "step 12: the loss or gradient norm is not finite"),
    ],
)
def test_i13_a_non_finite_state_is_never_committed_and_names_layer_and_step(
    tmp_path: Path, poison: Any, words: str
) -> None:
    storage = str(tmp_path / "store")
    with pytest.raises(RankFailedError, match=f"NonFiniteStateError: {words}"):
        run_ranks(2, tmp_path, poison, storage)
    events = {path.name[5:13] for path in Path(storage, "run/layercheck/events").iterdir()}
    assert f"{POISONED_AT - 1:08d}" in events
    assert f"{POISONED_AT:08d}" not in events
