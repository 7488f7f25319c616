"""The trainer state of a foreign loop, and the loop of the page on resuming, run as it stands there."""

import os
import signal
from pathlib import Path
from typing import Any

from tests.documents import ROOT, python_of
from tests.harness import run_ranks
from tests.integration.ranks import open_session

EPOCHS, STEPS_PER_EPOCH, KILL_AT = 4, 5, 13
ACCUMULATION, MICRO_BATCH = 2, 7
ROWS = 2 * (STEPS_PER_EPOCH * ACCUMULATION * MICRO_BATCH + 3)
"""Of two ranks; some rows of an epoch make no whole step."""


class Watched:
    """An engine that notes the rows of each forward pass beside its step."""

    def __init__(self, engine: Any) -> None:
        self.engine, self.seen = engine, []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def __call__(self, **batch: Any) -> Any:
        self.seen.append((self.engine.global_steps + 1, batch.pop("row").tolist()))
        return self.engine(**batch)


def dataset() -> list[dict[str, Any]]:
    import torch

    from tests.micro import SEQ, VOCAB

    tokens = torch.randint(0, VOCAB, (ROWS, SEQ), generator=torch.Generator().manual_seed(1))
    return [{"row": row, "input_ids": tokens[row], "labels": tokens[row]} for row in range(ROWS)]


def follow_the_page(storage: str, kill_at: int | None) -> dict[str, Any]:
    from tests import micro

    engine = Watched(micro.build(accumulation=ACCUMULATION))
    session = open_session(engine.engine, storage)
    after_step = session.after_step

    def and_die(step: int, state: dict[str, Any]) -> Any:
        report = after_step(step, state)
        if step == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return report

    session.after_step = and_die
    names = {"engine": engine, "session": session, "dataset": dataset(), "epochs": EPOCHS}
    exec(python_of(ROOT / "docs/how-to/resume.md"), names)
    session.close()
    return {"point": names["point"], "seen": engine.seen, **_saved_at_once(engine.engine, storage)}


def _saved_at_once(engine: Any, storage: str) -> dict[str, Any]:
    """A recovery that saves before it makes a step, and what the next one gets."""
    states = []
    for _ in range(2):
        session = open_session(engine, storage)
        states.append(session.resume().trainer_state)
        session.save_now()
        session.close()
    return {"before": states[0], "after": states[1]}


def expected(rank: int) -> list[tuple[int, list[int]]]:
    from torch.utils.data import DistributedSampler

    sampler: Any = DistributedSampler(dataset(), num_replicas=2, rank=rank, shuffle=True, seed=0)
    batches = []
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        order = list(sampler)
        for micro in range(STEPS_PER_EPOCH * ACCUMULATION):
            step = epoch * STEPS_PER_EPOCH + micro // ACCUMULATION + 1
            batches.append((step, order[micro * MICRO_BATCH : (micro + 1) * MICRO_BATCH]))
    return batches


def test_the_loop_of_the_page_goes_on_with_the_batches_that_come_next(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    assert run_ranks(2, tmp_path, follow_the_page, store, KILL_AT) == [None, None]
    for rank, result in enumerate(run_ranks(2, tmp_path, follow_the_page, store, None)):
        first = result["point"].step
        assert 1 <= first <= KILL_AT + 1
        assert result["seen"] == [one for one in expected(rank) if one[0] >= first]
        last = EPOCHS * STEPS_PER_EPOCH
        assert result["before"]["step"] == result["after"]["step"] == last
        assert result["after"]["loss"] == result["before"]["loss"], "a save before the first step keeps it"
