"""Parts of a run's tables: complete, readable together, and never in the way of training."""

import threading
from collections.abc import Iterable
from pathlib import Path

import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from layercheck.errors import StorageError
from layercheck.tracking.metrics_log import DRIFT, METRICS, PartWriter


class Folder:
    """A storage on a real folder that can be told to fail or to stall."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.broken = False
        self.entered = threading.Event()
        self.go_on = threading.Event()
        self.go_on.set()

    def write(self, path: str, chunks: Iterable[bytes]) -> None:
        self.entered.set()
        assert self.go_on.wait(10)
        if self.broken:
            raise StorageError(f"path={path}: no space left", path=path)
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(chunks))

    def parts(self, folder: str) -> list[str]:
        return sorted(path.name for path in (self.root / folder).glob("*"))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


def writer(folder: Folder, **settings: object) -> PartWriter:
    known = {"attempt": 2, "flush_s": 60, "schema": METRICS, "clock": Clock()} | settings
    return PartWriter(folder, "metrics", **known)


def test_a_part_holds_all_columns_and_carries_the_attempt_in_its_name(folder: Folder):
    table = writer(folder)
    table.add({"step": 1, "loss": 2.5, "layers_written": 3})
    table.add({"step": 2, "loss": 2, "max_age": 7})
    assert table.close()
    assert folder.parts("metrics") == ["attempt-002-00000.parquet"]
    part = pq.read_table(folder.root / "metrics/attempt-002-00000.parquet")
    assert part.schema.names == METRICS.names
    assert part.column("loss").to_pylist() == [2.5, 2.0]
    assert part.column("max_age").to_pylist() == [None, 7]


def test_parts_of_several_attempts_are_read_as_one_table(folder: Folder):
    for attempt, loss in ((1, 3), (2, 2.5)):
        table = writer(folder, attempt=attempt)
        table.add({"step": attempt, "loss": loss})
        assert table.close()
    rows = ds.dataset(folder.root / "metrics").to_table().sort_by("step").to_pylist()
    assert [(row["step"], row["loss"]) for row in rows] == [(1, 3.0), (2, 2.5)]


def test_nothing_is_written_before_the_flush_time_and_something_after_it(folder: Folder):
    clock = Clock()
    table = writer(folder, clock=clock)
    table.add({"step": 1})
    assert not folder.entered.is_set()
    clock.now = 60
    table.add({"step": 2})
    assert folder.entered.wait(10)
    assert table.close()
    assert pq.read_table(folder.root / "metrics").num_rows == 2


def test_i9_a_slow_storage_does_not_hold_up_the_training_thread(folder: Folder):
    folder.go_on.clear()
    table = writer(folder, flush_s=0)
    table.add({"step": 1})
    assert folder.entered.wait(10)
    table.add({"step": 2})
    folder.go_on.set()
    assert table.close()
    assert sorted(pq.read_table(folder.root / "metrics").column("step").to_pylist()) == [1, 2]


def test_i9_rows_of_a_failed_part_are_reported_kept_and_written_later(folder: Folder):
    table = writer(folder)
    folder.broken = True
    table.add({"step": 1})
    assert not table.flush()
    assert "no space left" in table.problem
    folder.broken = False
    table.add({"step": 2})
    assert table.close()
    assert table.problem is None
    assert folder.parts("metrics") == ["attempt-002-00000.parquet"]
    assert pq.read_table(folder.root / "metrics").column("step").to_pylist() == [1, 2]


def test_a_hanging_storage_bounds_the_time_of_close(folder: Folder):
    folder.go_on.clear()
    table = writer(folder)
    table.add({"step": 1})
    assert not table.close(timeout_s=0.05)
    folder.go_on.set()


def test_memory_is_bounded_while_the_storage_fails_and_the_loss_is_counted(folder: Folder):
    table = writer(folder, max_rows=3)
    folder.broken = True
    for step in range(5):
        table.add({"step": step})
        table.flush()
    assert table.dropped == 2
    folder.broken = False
    assert table.close()
    assert pq.read_table(folder.root / "metrics").column("step").to_pylist() == [2, 3, 4]


def test_rows_added_while_a_part_is_written_are_in_the_next_one_exactly_once(folder: Folder):
    table = writer(folder, flush_s=0, max_rows=2)
    folder.go_on.clear()
    table.add({"step": 1})
    assert folder.entered.wait(10)
    table.add({"step": 2})
    table.add({"step": 3})
    folder.go_on.set()
    assert table.close()
    assert pq.read_table(folder.root / "metrics").column("step").to_pylist() == [1, 2, 3]


def test_a_column_that_the_table_does_not_have_is_refused_by_name(folder: Folder):
    with pytest.raises(ValueError, match="unknown column 'layers'"):
        writer(folder, schema=DRIFT).add({"layers": 3})


def test_closing_without_rows_writes_no_part(folder: Folder):
    assert writer(folder).close()
    assert folder.parts("metrics") == []


def test_rows_that_a_close_could_not_write_are_written_by_the_next_one(folder: Folder):
    table = writer(folder)
    folder.broken = True
    table.add({"step": 1})
    assert not table.close()
    folder.broken = False
    assert table.close()
    assert pq.read_table(folder.root / "metrics").column("step").to_pylist() == [1]
