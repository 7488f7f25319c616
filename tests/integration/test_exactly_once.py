"""A kill in the second epoch, in the middle of an accumulation: every sample once an epoch, on real ranks."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.harness import run_ranks
from tests.integration.test_models import settings_of
from tests.samples import MEDQA
from tests.small_models import make_folder

STEPS, KILL_STEP = 9, 5
"""12 sequences in batches of 4: an epoch is three steps, the kill is in the second one."""


class Note:
    """Writes down, after each optimizer step, which sequences went into it and at which rate."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.taken: list[list[int]] = []

    def built(self, engine: Any, for_recovery: bool) -> None:
        self.engine = engine

    def begun(self, point: Any) -> None:
        pass

    def stepped(self, step: int) -> None:
        with self.path.open("a") as file:
            line = [step, self.engine.optimizer.param_groups[0]["lr"], self.taken]
            file.write(json.dumps(line) + "\n")
            os.fsync(file.fileno())


def _life(storage: str, model: str, notes: str, streaming: bool, kill_step: int) -> Any:
    import signal

    import torch.distributed as dist

    from app import step as step_module
    from app import train_loop
    from app.loader import StepLoader

    rank = dist.get_rank()
    note = Note(Path(notes) / f"{rank}.jsonl")
    take, forward = StepLoader.take, step_module.answer_loss
    now = {"step": 0, "micro": 0}

    def spy(self: Any, step: int) -> Any:
        data = take(self, step)
        note.taken = [row.tolist() for batch in data.batches for row in batch.input_ids]
        now.update(step=step, micro=0)
        return data

    def loss(*arguments: Any) -> Any:
        now["micro"] += 1
        if now == {"step": kill_step, "micro": 2}:
            os.kill(os.getpid(), signal.SIGKILL)
        return forward(*arguments)

    StepLoader.take, step_module.answer_loss = spy, loss  # type: ignore[method-assign]
    more = {"data": {"source": str(MEDQA), "seq_len": 256, "packing": False, "streaming": streaming}}
    train = {"global_batch": 4, "schedule": "cosine", "lr_warmup_steps": 2}
    config = settings_of(storage, {"path": model}, STEPS, train=train, **more)
    return train_loop.train(config, rank=rank, world_size=2, submission="one", witness=note).status


def _read(notes: Path) -> tuple[list[str], list[float]]:
    """Sequences in the order of training and the rate of each step; of two runs of a step the later."""
    found: dict[int, dict[int, Any]] = {}
    for rank in (0, 1):
        for line in (notes / f"{rank}.jsonl").read_text().splitlines():
            step, lr, taken = json.loads(line)
            found.setdefault(step, {})[rank] = (lr, taken)
    assert sorted(found) == list(range(1, STEPS + 1))
    order = [json.dumps(row) for step in sorted(found) for rank in (0, 1) for row in found[step][rank][1]]
    return order, [found[step][0][0] for step in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize("streaming", [False, True], ids=["random access", "stream"])
def test_a_kill_in_the_second_epoch_within_an_accumulation_repeats_and_loses_no_sample(
    tmp_path: Path, streaming: bool
) -> None:
    model = str(make_folder(tmp_path / "model"))
    for name in ("whole", "killed"):
        (tmp_path / f"notes-{name}").mkdir()
    whole = [str(tmp_path / "whole"), model, str(tmp_path / "notes-whole"), streaming]
    killed = [str(tmp_path / "killed"), model, str(tmp_path / "notes-killed"), streaming]
    assert run_ranks(2, tmp_path, _life, *whole, 0) == ["completed"] * 2
    assert run_ranks(2, tmp_path, _life, *killed, KILL_STEP) == [None, None]
    assert run_ranks(2, tmp_path, _life, *killed, 0) == ["completed"] * 2
    order, rates = _read(tmp_path / "notes-whole")
    assert _read(tmp_path / "notes-killed") == (order, rates)
    assert len(set(rates)) > 5
    for first in range(0, 36, 12):
        assert set(Counter(order[first : first + 12]).values()) == {1}
    assert (order[:12] == order[12:24]) == streaming, "another order in each epoch, but for a stream"
    assert set(order[:12]) == set(order[12:24])
