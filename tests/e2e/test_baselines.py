"""Each method compared with, killed under Ray Train, ends as the run that nothing disturbed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.head import PrivateHead, start_head
from cluster.witness import Notes
from tests.e2e.runs import finish, metrics, start_app, summary

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 14
CHECKFREQ = {"profile_from": 2, "profile_steps": 2, "max_overhead": 0.5}
CASES: dict[str, tuple[dict[str, Any], list[dict[str, int]]]] = {
    "deepspeed": ({"interval_steps": 4}, [{"rank": 1, "step": 10}]),
    "dcp_async": ({"interval_steps": 4}, [{"rank": 1, "step": 10}]),
    "checkfreq": (CHECKFREQ, [{"rank": 1, "step": 7}, {"rank": 0, "step": 11}]),
}
"""Method -> its settings, and the kills."""


@pytest.fixture(scope="module")
def head() -> Iterator[PrivateHead]:
    with start_head(num_cpus=6) as started:
        yield started


def _run(head: PrivateHead, storage: Path, method: str, **settings: Any) -> Path:
    folder = storage / method
    more = {
        "checkpoint.method": method,
        "train.steps": STEPS,
        "train.dtype": "fp32",
        "faults.witness": folder / "witness",
        **settings,
    }
    code, output = finish(start_app(head, storage, method, **more))
    assert code == 0, output[-4000:]
    return folder


def _end(folder: Path) -> dict[int, Any]:
    """Rank -> its hashes of every layer after the last step."""
    found = {
        life.rank: hashes
        for life in Notes(folder / "witness").lives()
        for step, hashes in life.steps
        if step == STEPS
    }
    assert set(found) == {0, 1}
    return found


@pytest.fixture(scope="module")
def undisturbed(head: PrivateHead, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Any]:
    return _end(_run(head, tmp_path_factory.mktemp("storage"), "none"))


@pytest.mark.parametrize("method", CASES)
def test_a_killed_run_ends_bit_for_bit_as_an_undisturbed_one(
    method: str, head: PrivateHead, undisturbed: dict[int, Any], tmp_path: Path
) -> None:
    settings, kills = CASES[method]
    changed = {f"checkpoint.baseline.{method}.{key}": value for key, value in settings.items()}
    folder = _run(head, tmp_path, method, **changed, **{"faults.kill": kills})
    assert _end(folder) == undisturbed
    found = summary(folder)
    assert (found["status"], found["method"], found["steps"]) == ("completed", method, STEPS)
    assert found["injected"] == kills
    assert (found["attempts"], found["failures"]) == (len(kills) + 1, len(kills))
    assert len(found["resumed"]) == len(kills)
    for resumed, kill in zip(found["resumed"], kills, strict=True):
        assert resumed["resume_step"] <= resumed["t_fail"] + 1 <= kill["step"] + 1
        assert resumed["mode"] == "uniform"
        assert None not in [resumed[key] for key in ("detect_s", "reschedule_s", "first_step_s", "replay_s")]
    last = [row["step"] for row in metrics(folder) if row["attempt"] == found["attempts"]]
    assert last == list(range(found["resumed"][-1]["resume_step"], STEPS + 1))
    assert found["events"] >= 2
    assert found["bytes_written"] > 0
    assert found["layer_writes"] == found["events"] * len(found["resumed"][0]["ages"])


def test_lowdiff_killed_between_two_bases_ends_as_its_own_undisturbed_run(
    head: PrivateHead, tmp_path: Path
) -> None:
    """Top-k changes training, so its reference is itself."""
    settings = {"mode": "topk", "batch": 2, "base_every": 5}
    changed = {f"checkpoint.baseline.lowdiff.{key}": value for key, value in settings.items()}
    plain = _run(head, tmp_path / "plain", "lowdiff", **changed)
    kills = [{"rank": 1, "step": 9}]
    folder = _run(head, tmp_path / "killed", "lowdiff", **changed, **{"faults.kill": kills})
    assert _end(folder) == _end(plain)
    found = summary(folder)
    assert (found["status"], found["method"], found["attempts"]) == ("completed", "lowdiff", 2)
    (resumed,) = found["resumed"]
    assert resumed["resume_step"] <= resumed["t_fail"] + 1 <= 10
    assert resumed["resume_step"] % 2 == 1, "a recovery ends where a batch does"
    assert resumed["resume_step"] > 1, "nothing was recovered"
