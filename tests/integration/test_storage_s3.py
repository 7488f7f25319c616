"""A whole session on an object store: a real S3 protocol, spoken with a server on this machine."""

import logging
import os
import time
import urllib.request
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from layercheck.coordination import journal
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.errors import DamagedShardError, StorageError
from layercheck.persistence.storage import Storage, open_storage, open_store
from tests.harness import RankFailedError, run_ranks
from tests.integration.ranks import CONFIG, train

SECRET = "a-key-that-nobody-may-read"
KEYS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": SECRET}
STEPS, KILL_AT = 24, 17


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """`host:port` of an S3 server that keeps everything in memory."""
    from moto.server import ThreadedMotoServer

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    started = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    yield f"{host}:{port}"
    started.stop()


@pytest.fixture
def uri(server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A storage URI in a bucket of this test alone."""
    for name, value in KEYS.items():
        monkeypatch.setenv(name, value)
    bucket = f"b{abs(hash(str(tmp_path)))}"
    urllib.request.urlopen(urllib.request.Request(f"http://{server}/{bucket}", method="PUT"), timeout=10)
    return f"s3://{bucket}/runs?endpoint_override={server}&scheme=http"


def _train_with_keys(uri: str, steps: int, **how: Any) -> Any:
    os.environ |= KEYS
    return train(uri, steps, **how)


def _all_objects(storage: Storage, folder: str, found: dict[str, int]) -> dict[str, int]:
    for name in storage.list(folder):
        path = f"{folder}/{name}"
        size = storage.size(path)
        if "." in name and storage.list(path) == []:
            found[path] = size or 0
        else:
            _all_objects(storage, path, found)
    return found


@pytest.mark.slow
def test_a_run_on_s3_is_killed_and_goes_on_at_the_next_step(uri: str, tmp_path: Path) -> None:
    undisturbed = run_ranks(2, tmp_path, train, str(tmp_path / "local"), STEPS)[0]["losses"]
    die = partial(_train_with_keys, kill_at=KILL_AT, save_at=KILL_AT)
    assert run_ranks(2, tmp_path, die, uri, STEPS) == [None, None]
    for result in run_ranks(2, tmp_path, partial(_train_with_keys, seed=99), uri, STEPS):
        assert result["first"] == KILL_AT + 1
        assert result["receipt"]["max_age"] == 0
        assert result["losses"] == {step: undisturbed[step] for step in range(KILL_AT + 1, STEPS + 1)}
        assert max(report.max_age for report in result["reports"].values()) <= CONFIG["s_max"]
    store = open_storage(uri, "run")
    assert journal.attempt_numbers(store) == [1, 2]
    assert journal.read_attempt(store, 2).lineage[-1].saw_step == KILL_AT
    _assert_objects_per_event(store)
    _assert_nothing_tells_the_secret(store)


def _assert_objects_per_event(store: Storage) -> None:
    """One object for each rank and one commit, no folder markers beside them."""
    events = {name: store.list(f"events/{name}") for name in store.list("events")}
    assert len(events) >= 4
    for name, objects in events.items():
        assert objects == ["commit.parquet", "rank-00000.safetensors", "rank-00001.safetensors"], name


def _assert_nothing_tells_the_secret(store: Storage) -> None:
    objects = _all_objects(store, "attempts", {"run.json": 0})
    assert len(objects) >= 5
    for path in objects:
        assert SECRET.encode() not in store.read(path), path


@pytest.mark.slow
def test_a_composite_is_recovered_from_s3_at_another_number_of_ranks(uri: str, tmp_path: Path) -> None:
    die = partial(_train_with_keys, kill_at=KILL_AT)
    assert run_ranks(2, tmp_path, die, uri, STEPS) == [None, None]
    result = run_ranks(3, tmp_path, partial(_train_with_keys, seed=99), uri, STEPS)[0]
    assert result["receipt"]["mode"] == "composite"
    assert result["receipt"]["resume_step"] == result["first"] <= KILL_AT + 1
    assert len({layer["step"] for layer in result["receipt"]["layers"]}) >= 2
    assert result["receipt"]["bad"] == ()


def test_objects_are_written_read_listed_and_deleted(uri: str) -> None:
    store = open_storage(uri, "run")
    store.write("events/e/x.bin", [b"abc", memoryview(b"def")])
    large = os.urandom(1 << 20) * 11  # more than one request
    store.write("events/e/large.bin", [large[:1000], large[1000:]])
    assert store.read("events/e/x.bin", 2, 4) == b"cd"
    assert store.read("events/e/large.bin") == large
    assert store.size("none") is None
    assert store.list("none") == []
    assert store.list("events/e") == ["large.bin", "x.bin"]
    with pytest.raises(DamagedShardError, match=r"x\.bin is short: 6 of 9"):
        store.read_into("events/e/x.bin", 0, memoryview(bytearray(9)))
    store.delete("events/e")
    assert store.list("events/e") == []
    store.write("run.json", [b"{}"])
    scheme, mark, query = uri.partition("?")
    for argument in (f"{scheme}/run{mark}{query}", f"{scheme}/run/layercheck{mark}{query}"):
        assert open_store(argument).read("run.json") == b"{}"


def test_the_endpoint_may_come_from_the_environment(
    uri: str, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    open_storage(uri, "run").write("probe", [b"seen"])
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{server}")
    assert open_storage(uri.partition("?")[0], "run").read("probe") == b"seen"


def test_i2_an_exception_while_the_bytes_come_publishes_nothing(uri: str) -> None:
    def broken() -> Iterator[bytes]:
        yield b"half"
        raise StorageError("the snapshot was given up")

    store = open_storage(uri, "run")
    with pytest.raises(StorageError, match="given up"):
        store.write("events/e/rank-00000.safetensors", broken())
    assert store.size("events/e/rank-00000.safetensors") is None


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (f"s3://test:{SECRET}@bucket/runs", "with a key in it"),
        ("s3://bucket/runs?endpoint_overide=localhost:1", "unknown option 'endpoint_overide'"),
    ],
)
def test_a_uri_with_a_key_or_an_unknown_option_is_refused_and_no_key_is_told(wrong: str, words: str) -> None:
    with pytest.raises(StorageError, match=words) as refused:
        open_storage(wrong, "run")
    assert SECRET not in str(refused.value)
    assert SECRET not in repr(refused.value.facts)


def test_a_bucket_that_is_not_there_ends_in_one_error_on_all_ranks(server: str, tmp_path: Path) -> None:
    nowhere = f"s3://no-such-bucket/runs?endpoint_override={server}&scheme=http"
    with pytest.raises(RankFailedError, match=r"StorageError: cannot write probe-.*`storage`"):
        run_ranks(2, tmp_path, _train_with_keys, nowhere, 1)


def _submit(uri: str) -> dict[str, Any]:
    """One of two submissions that know nothing of each other and start in the same moment."""
    import torch.distributed as dist

    from layercheck.coordination.coordinator import Coordinator
    from tests.runs import Group, config, run_record

    os.environ |= KEYS
    name = f"submission-{dist.get_rank()}"
    storage = open_storage(uri, "run")
    coordinator = Coordinator(storage, config())
    dist.barrier()
    storage.write(f"probe-{name}", [b"seen"])
    coordinator.open_run(run_record(), f"probe-{name}")
    grant = coordinator.begin_attempt(f"{dist.get_rank():032x}", name, 2, "composite", takeover=True)
    group = Group(coordinator, storage, grant)  # type: ignore[arg-type]
    for step in range(grant.r_b, grant.r_b + 6):
        group.save(step)
        if group.beat(step).fenced:
            return {"name": name, "attempt": grant.attempt, "fenced": True, "step": step}
        time.sleep(0.5)
    coordinator.close()
    return {"name": name, "attempt": grant.attempt, "fenced": False, "step": step}


@pytest.mark.slow
def test_i15_of_two_submissions_in_the_same_moment_one_lineage_survives(uri: str, tmp_path: Path) -> None:
    results = run_ranks(2, tmp_path, _submit, uri)
    (survivor,) = [result for result in results if not result["fenced"]]
    facts = journal.load_facts(open_storage(uri, "run"))
    assert facts.newest is not None
    assert (facts.newest.submission, facts.newest.attempt) == (survivor["name"], survivor["attempt"])
    plan = make_plan(facts, PlanRequest(2))
    assert plan is not None
    assert plan.t_fail == survivor["step"]
    assert {(layer.step, layer.attempt) for layer in plan.layers} == {(survivor["step"], survivor["attempt"])}
