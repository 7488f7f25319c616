"""Full-state methods: whatever breaks, the end is bit for bit that of the run that nothing disturbed."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from app.baselines.settings import CheckFreqSettings
from layercheck.zero3 import Zero3Engine
from tests import micro
from tests.fakes import flip_bit
from tests.harness import run_ranks
from tests.integration.methods import open_method, state_of, train

STEPS, LOST_AT, EVERY = 9, 8, 3


def deepspeed(zero3: Any, committer: Any) -> Any:
    from app.baselines.deepspeed import DeepSpeedCheckpoints

    return DeepSpeedCheckpoints(zero3, committer, EVERY)


def dcp_async(zero3: Any, committer: Any) -> Any:
    from app.baselines.committer import own_group
    from app.baselines.dcp_async import DcpAsync

    return DcpAsync(zero3, committer, own_group(60), EVERY, 60)


def checkfreq(zero3: Any, committer: Any) -> Any:
    from app.baselines.checkfreq import CheckFreq

    return CheckFreq(zero3, committer, CheckFreqSettings(mode="manual", interval_steps=EVERY), 60)


METHODS = {made.__name__: made for made in (deepspeed, dcp_async, checkfreq)}


def _abandoned(folder: str, make: Any) -> list[Any]:
    """Trains to LOST_AT and leaves everything as it is; the live state is spoilt after each staging."""
    engine = micro.build()
    session = open_method(engine, folder, make)
    session.resume()
    reports = []
    for step in range(1, LOST_AT + 1):
        loss = micro.train_step(engine, step)
        reports.append(session.after_step(step, {"loss": loss}))
    # Of step 6, whenever its bytes reach the disk: whatever is live now must not be among them.
    for sub_group in session._zero3.sub_groups:
        sub_group.flat.fill_(np.nan)
    background = getattr(session.method, "_background", None)
    if background is not None:
        background.wait()
    if session._book is not None:
        session._book.close("lost", {})
    return reports


def _resumed(folder: str, make: Any, rot: bool) -> dict[str, Any]:
    import torch.distributed as dist

    if rot and dist.get_rank() == 0:
        newest = sorted(Path(folder).glob("m/step-*"))[-1]
        victim = max(
            (each for each in newest.rglob("*") if each.is_file()), key=lambda each: each.stat().st_size
        )
        flip_bit(victim, 4 * victim.stat().st_size)
    dist.barrier()
    return train(folder, make, STEPS, seed=5)


def _lives(folder: str) -> dict[str, Any]:
    """On each rank: the run without a session, then each method abandoned, resumed, and resumed past rot."""
    import torch.distributed as dist

    engine = micro.build()
    losses = {step: micro.train_step(engine, step) for step in range(1, STEPS + 1)}
    found: dict[str, Any] = {"none": {"losses": losses, "state": state_of(Zero3Engine(engine))}}
    for name, make in METHODS.items():
        place = f"{folder}/{name}"
        reports = _abandoned(place, make)
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.copytree(place, f"{place}-rot")
        dist.barrier()
        found[name] = {
            "reports": reports,
            "resumed": _resumed(place, make, rot=False),
            "past_rot": _resumed(f"{place}-rot", make, rot=True),
        }
    return found


@pytest.fixture(scope="module")
def lives(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    tmp = tmp_path_factory.mktemp("lives")
    return tmp, run_ranks(2, tmp, _lives, str(tmp))


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize(("life", "first"), [("resumed", 7), ("past_rot", 4)])
def test_a_lost_run_ends_in_the_state_of_an_undisturbed_one(
    lives: tuple[Path, list[Any]], name: str, life: str, first: int
) -> None:
    for rank in lives[1]:
        whole, after = rank["none"], rank[name][life]
        assert after["first"] == first
        assert after["losses"] == {step: whole["losses"][step] for step in range(first, STEPS + 1)}
        assert whole["state"].keys() == after["state"].keys()
        for key, value in whole["state"].items():
            np.testing.assert_equal(after["state"][key], value, err_msg=key)


@pytest.mark.parametrize("name", METHODS)
def test_the_books_say_what_was_saved_and_what_came_back(lives: tuple[Path, list[Any]], name: str) -> None:
    folder, ranks = lives
    resumed = ranks[0][name]["resumed"]
    costs, receipt = resumed["costs"], resumed["receipt"]
    assert (receipt["t_fail"], receipt["resume_step"], receipt["max_age"]) == (8, 7, 0)
    assert costs["events"] == 1, "the last step; step 9 was saved once"
    assert costs["replay_s"] >= 0
    numel = sum(
        value.size for rank in ranks for key, value in rank["none"]["state"].items() if key.endswith("fp32")
    )
    tensors = sum(hasattr(value, "size") for rank in ranks for value in rank["none"]["state"].values())
    headers = tensors * (2_000 if name == "dcp_async" else 500)  # DCP saves each tensor as an archive
    assert 12 * numel <= costs["bytes"] <= 12 * numel + headers
    assert costs["bytes"] == costs["mean_event_bytes"]
    kept = sorted(path.parent.name for path in (folder / name).glob("m/step-*/commit.json"))
    assert kept == ["step-00000006", "step-00000009"], "two commits stay"


def test_a_store_of_torn_commits_alone_is_an_error_and_not_a_fresh_start(tmp_path: Path) -> None:
    (message,) = run_ranks(1, tmp_path, _all_torn, str(tmp_path / "run"))
    assert "every commit (steps [4, 2]) is damaged" in message


def _all_torn(folder: str) -> str:
    from layercheck.errors import NoPlanError

    train(folder, checkfreq_every_2, 4)
    for path in Path(folder).glob("m/step-*/rank-00000.safetensors"):
        flip_bit(path, 4 * path.stat().st_size)
    try:
        train(folder, checkfreq_every_2, 4)
    except NoPlanError as error:
        return str(error)
    return ""


def checkfreq_every_2(zero3: Any, committer: Any) -> Any:
    from app.baselines.checkfreq import CheckFreq

    return CheckFreq(zero3, committer, CheckFreqSettings(mode="manual", interval_steps=2), 60)
