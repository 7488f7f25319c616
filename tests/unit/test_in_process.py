import threading
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from layercheck.coordination import journal
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.in_process import in_process_client
from layercheck.errors import CoordinatorLostError, StorageError
from layercheck.manifest import EventId
from layercheck.persistence.storage import LocalStorage
from tests.runs import LAYERS, Group, config, run_record


@pytest.fixture
def storage(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "layercheck"))


@pytest.fixture
def stores() -> list[dist.TCPStore]:
    """Two connections to one store: what two ranks have."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return [server, dist.TCPStore("127.0.0.1", server.port, is_master=False)]


def begin(storage: LocalStorage, client: Any) -> Group:
    storage.write("probe", [b"x"])
    client.open_run(run_record(), "probe")
    return Group(client, storage, client.begin_attempt("t1", "s1", 2, "composite"))


def test_both_ranks_commit_an_event_through_the_store(storage: LocalStorage, stores: list[Any]) -> None:
    zero = in_process_client(storage, config(), 0, 2, stores[0])
    one = in_process_client(storage, config(), 1, 2, stores[1])
    group = begin(storage, zero)
    for step in (0, 2):
        group.record(step, 0, LAYERS)
        event, rows = group.write(step, 1, LAYERS)
        one.record(event, 1, rows, group.state(step))  # returns when rank 0 has it
        assert group.beat(step).committed_step == step
    one.lost(EventId(step=3, attempt=1), 1, "disk full")
    assert group.beat(3).lost_steps == (3,)
    zero.end_attempt(1, "completed")
    zero.close()
    assert journal.read_progress(storage, 1).ended == "completed"


def test_a_second_session_of_the_same_processes_starts_clean(
    storage: LocalStorage, stores: list[Any], tmp_path: Path
) -> None:
    for number in range(2):
        place = LocalStorage(str(tmp_path / f"run{number}"))
        zero = in_process_client(place, config(), 0, 2, stores[0])
        one = in_process_client(place, config(), 1, 2, stores[1])
        group = begin(place, zero)
        group.record(0, 0, LAYERS)
        event, rows = group.write(0, 1, LAYERS)
        one.record(event, 1, rows, {"step": 0})
        assert group.beat(0).committed_step == 0
        zero.close()


def test_errors_arrive_as_their_own_class(
    storage: LocalStorage, stores: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise StorageError("no space", path="x")

    monkeypatch.setattr(Coordinator, "lost", refuse)
    zero = in_process_client(storage, config(), 0, 2, stores[0])
    one = in_process_client(storage, config(), 1, 2, stores[1])
    with pytest.raises(StorageError, match="no space") as caught:
        one.lost(EventId(step=3, attempt=1), 1, "x")
    assert caught.value.facts == {"path": "x"}
    zero.close()


def test_a_rank_zero_that_does_not_answer_is_named_within_the_limit(
    storage: LocalStorage, stores: list[Any]
) -> None:
    one = in_process_client(storage, config(), 1, 2, stores[1], answer_s=0.1)
    with pytest.raises(CoordinatorLostError, match=r"did not answer within 0\.1 s"):
        one.lost(EventId(step=3, attempt=1), 1, "x")


def test_the_end_waits_for_the_last_event_of_slower_ranks(storage: LocalStorage, stores: list[Any]) -> None:
    zero = in_process_client(storage, config(), 0, 2, stores[0])
    one = in_process_client(storage, config(), 1, 2, stores[1])
    group = begin(storage, zero)
    group.record(0, 0, LAYERS)
    ended = threading.Event()

    def end() -> None:
        zero.end_attempt(1, "completed")
        ended.set()

    thread = threading.Thread(target=end)
    thread.start()
    assert not ended.wait(0.3)
    event, rows = group.write(0, 1, LAYERS)
    one.record(event, 1, rows, {"step": 0})
    assert ended.wait(20)
    thread.join(20)
    assert len(journal.load_commits(storage)[0]) == 1
    zero.close()
