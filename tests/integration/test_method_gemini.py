"""GEMINI on a ZeRO-3 engine: exact after every loss, storage rarely, figures reported."""

from typing import Any

import numpy as np
import pytest

from tests.harness import run_ranks
from tests.integration.gemini_hosts import hosts
from tests.integration.gemini_lives import story


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank says."""
    tmp = tmp_path_factory.mktemp("gemini")
    with hosts(tmp / "hosts", *"abcdefg"):
        return run_ranks(2, tmp, story, str(tmp), str(tmp / "hosts"))


@pytest.mark.parametrize(
    ("what", "first", "source"),
    [
        ("trainers died", 5, "host memory, step 4: 2 shards of the own host, 0 of another"),
        ("host b died", 6, "host memory, step 5: 1 shards of the own host, 1 of another"),
        ("both hosts died", 7, "storage, step 6"),
    ],
)
def test_a_run_goes_on_from_the_nearest_copy(told, what, first, source):
    for rank in told:
        assert (rank[what]["first"], rank[what]["source"]) == (first, source)


def test_every_life_is_bit_for_bit_the_uninterrupted_run(told):
    for rank in told:
        losses, state = rank["reference"]
        for what in ("first", "trainers died", "host b died", "both hosts died"):
            assert rank[what]["losses"] == {step: losses[step] for step in rank[what]["losses"]}
            assert rank[what]["alerts"] == []
        last = rank["both hosts died"]["state"]
        assert last.keys() == state.keys()
        for name, value in state.items():
            np.testing.assert_equal(last[name], value, err_msg=name)


def test_nothing_goes_to_the_storage_between_two_saves(told):
    lives = ("first", "trainers died", "host b died", "both hosts died")
    assert [told[0][what]["costs"]["events"] for what in lives] == [1, 0, 1, 2]  # steps 3, 6, 9 and the last
    assert told[0]["trainers died"]["costs"]["bytes"] == 0
    assert all(step > 3 for step in told[0]["first"]["written_at"])


def test_bytes_of_host_and_network_and_seconds_are_reported(told):
    states = [sum(v.nbytes for k, v in rank["reference"][1].items() if "scalars" not in k) for rank in told]
    for rank, own in zip(told, states, strict=True):
        costs = rank["first"]["costs"]
        assert (costs["rounds"], costs["aligned_rounds"]) == (4, 4)
        assert 4 * own < costs["network_bytes"] < 4 * (own + 100_000)
        assert 4 * sum(states) < costs["host_bytes"] < 4 * (sum(states) + 200_000)
        assert 2 * sum(states) < costs["host_memory_bytes"] < 2 * (sum(states) + 400_000)
        assert all(costs[key] > 0 for key in ("copy_s", "exchange_s", "stall_s"))
        assert {"gate_s", "pressure_s"} < costs.keys()
        assert {"load_s", "reconstruct_s"} < rank["host b died"]["costs"].keys()


def test_memory_is_given_back_when_the_run_is_complete(told):
    assert told[0]["host b died"]["hosts"] == ["a", "c", "d", "e", "f", "g"]
    assert told[0]["both hosts died"]["hosts"] == []


def test_too_little_memory_on_one_host_is_told_on_all_ranks(told):
    assert told[0]["refused"] == "host f has too little memory"
    assert "another host has too little memory" in told[1]["refused"]
