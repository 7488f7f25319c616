"""A plain DeepSpeed loop that draws from the global generators of torch, numpy and Python on each rank."""

import os
import random
import signal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import layercheck
from tests import micro
from tests.harness import run_ranks
from tests.integration.ranks import CONFIG

STEPS, KILL_AT = 34, 27


def _draw_and_step(engine: Any) -> tuple[list[float], float]:
    """One step whose batch, dropout and batch order depend on what the generators hold."""
    import torch

    rank = torch.distributed.get_rank()
    draws = [float(torch.rand(1)), float(np.random.rand()), random.random(), random.gauss(0, 1)]
    batch = torch.randint(0, micro.VOCAB, (micro.GLOBAL_BATCH // 2, micro.SEQ))
    batch = batch[np.random.permutation(len(batch)).tolist()]
    batch[0, 0] = random.randrange(micro.VOCAB)
    loss = engine(input_ids=batch, labels=batch).loss
    engine.backward(loss)
    engine.step()
    return [rank, *draws], float(loss)


def _seed_all(seed: int) -> None:
    import torch

    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


def foreign_loop(
    storage: str,
    *,
    seed: int = 0,
    kill_at: int | None = None,
    save_at: int | None = None,
    rng: str = "captured",
) -> dict[str, Any]:
    import torch

    engine = micro.build(seed)
    session = layercheck.attach(engine, storage, "run", CONFIG, submission="one", rng=rng)
    _seed_all(seed + torch.distributed.get_rank())
    point = session.resume()
    draws, losses = {}, {}
    for step in range(point.step, STEPS + 1):
        draws[step], losses[step] = _draw_and_step(engine)
        session.after_step(step, {})
        if step == save_at:
            session.save_now()
        if step == kill_at:
            Path(storage, f"draws-{torch.distributed.get_rank()}.txt").write_text(repr(draws))
            os.kill(os.getpid(), signal.SIGKILL)
    session.close()
    return {
        "draws": draws,
        "losses": losses,
        "receipt": point.receipt.model_dump() if point.receipt else None,
    }


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    tmp = tmp_path_factory.mktemp("reference")
    return run_ranks(2, tmp, foreign_loop, str(tmp / "store"))


def test_i10_after_a_fresh_save_every_draw_of_every_generator_comes_as_it_would_have(
    tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    storage = str(tmp_path / "store")
    die = partial(foreign_loop, kill_at=KILL_AT, save_at=KILL_AT)
    assert run_ranks(2, tmp_path, die, storage) == [None, None]
    for rank, result in enumerate(run_ranks(2, tmp_path, partial(foreign_loop, seed=99), storage)):
        assert result["receipt"]["rng"] == f"captured at step {KILL_AT}"
        after = range(KILL_AT + 1, STEPS + 1)
        assert result["draws"] == {step: reference[rank]["draws"][step] for step in after}
        assert result["losses"] == {step: reference[rank]["losses"][step] for step in after}


def test_in_a_composite_the_draws_go_on_from_the_newest_event_and_the_receipt_names_its_step(
    tmp_path: Path, reference: list[dict[str, Any]]
) -> None:
    storage = str(tmp_path / "store")
    assert run_ranks(2, tmp_path, partial(foreign_loop, kill_at=KILL_AT), storage) == [None, None]
    for rank, result in enumerate(run_ranks(2, tmp_path, partial(foreign_loop, seed=99), storage)):
        receipt = result["receipt"]
        newest = max(layer["step"] for layer in receipt["layers"])
        assert receipt["rng"] == f"captured at step {newest}"
        assert result["draws"][receipt["resume_step"]] == reference[rank]["draws"][newest + 1]


@pytest.mark.slow
def test_without_the_setting_nothing_is_captured_and_the_receipt_says_keyed(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    die = partial(foreign_loop, kill_at=KILL_AT, rng="keyed")
    assert run_ranks(2, tmp_path, die, storage) == [None, None]
    assert b"rng" not in next(Path(storage).rglob("rank-00000.safetensors")).read_bytes()
    result = run_ranks(2, tmp_path, partial(foreign_loop, rng="keyed"), storage)[0]
    assert result["receipt"]["rng"] == "keyed"


@pytest.mark.slow
def test_at_another_world_size_the_receipt_says_that_the_generators_are_not_restored(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    assert run_ranks(2, tmp_path, partial(foreign_loop, kill_at=KILL_AT), storage) == [None, None]
    result = run_ranks(1, tmp_path, foreign_loop, storage)[0]
    assert result["receipt"]["rng"] == "not restored: no event of the plan holds the states of 1 ranks"
