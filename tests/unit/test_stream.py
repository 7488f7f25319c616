"""Rows of an IterableDataset: in order, once an epoch, from any step on, at any world size."""

import json
import logging
import re
from collections import Counter
from pathlib import Path
from threading import Event
from types import SimpleNamespace
from typing import Any

import pytest

from app.config import Config, parse
from app.loader import StepLoader, Window
from app.sources import seen_of_stream
from app.stream import Stream, open_stream
from layercheck.errors import ConfigError, StorageError

NUM_ROWS, BATCH = 50, 4


def write_rows(path: Path, rows: range = range(NUM_ROWS)) -> Path:
    """Questions of different length with a number of their own; every seventh row has no answer in reach."""
    lines = []
    for row in rows:
        long = "why " * 60 if row % 7 == 6 else ""
        turns = [
            {"from": "user", "value": f"{long}number {row}? {'so ' * (row % 5)}"},
            {"from": "assistant", "value": f"it is {row}"},
        ]
        lines.append(json.dumps({"conversations": turns}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_rows(tmp_path / "rows.jsonl")


def config(source: Path, cache: Path, **data: Any) -> Config:
    keys = {"source": str(source), "streaming": True, "seq_len": 64, "cache": str(cache), **data}
    return parse(
        {
            "model": {"config": {"model_type": "qwen2"}, "vocab_size": 512},
            "data": keys,
            "train": {"steps": 100, "global_batch": BATCH},
        }
    )


def loader(stream: Stream, rank: int = 0, world_size: int = 1) -> StepLoader:
    return StepLoader(stream, rank=rank, world_size=world_size, micro_batch=1, last_step=100, wait_s=20)


def take(reads: StepLoader, first: int, count: int) -> list[Any]:
    """The batches of some steps as lists, and where the stream then is."""
    found = []
    for step in range(first, first + count):
        data = reads.take(step)
        rows = [(b.input_ids.tolist(), b.labels.tolist(), b.documents.tolist()) for b in data.batches]
        found.append((rows, data.num_labels, reads.position))
    return found


def numbers(stream: Stream, steps: list[Any]) -> list[int]:
    """Numbers of the rows in the order of training."""
    said = []
    for rows, _, _ in steps:
        for ids, _, _ in rows:
            said += map(int, re.findall(r"it is (\d+)", stream.tokenizer.decode(ids[0])))
    return said


@pytest.mark.parametrize("packing", [True, False])
def test_after_a_kill_in_the_second_epoch_the_next_twenty_steps_are_those_of_the_run_that_went_on(
    source: Path, cache: Path, packing: bool
) -> None:
    settings = config(source, cache, packing=packing)
    stream = open_stream(settings)
    stream.seek(1, None)
    whole = take(loader(stream), 1, 40)

    killed = open_stream(settings)
    killed.seek(1, None)
    reads = loader(killed)
    take(reads, 1, 13)
    state = json.loads(json.dumps(reads.position))  # what the journal keeps; step 14 was read ahead
    reads.close()
    assert state["epoch"] > 0
    assert 0 < state["row"] < NUM_ROWS

    again = open_stream(settings)
    again.seek(14, state)
    assert take(loader(again), 14, 20) == whole[13:33]


@pytest.mark.parametrize("packing", [True, False])
def test_every_row_with_an_answer_comes_once_an_epoch_in_the_order_of_the_source(
    source: Path, cache: Path, packing: bool
) -> None:
    stream = open_stream(config(source, cache, packing=packing))
    stream.seek(1, None)
    steps = take(loader(stream), 1, 40)
    kept = [row for row in range(NUM_ROWS) if row % 7 != 6]
    said: Counter[int] = Counter()
    for step in steps:
        said.update(numbers(stream, [step]))
        epoch, row = step[2]["epoch"], step[2]["row"]
        assert said == {each: epoch + (each < row) for each in kept if epoch + (each < row)}
        assert step[1] > 0
    assert min(said.values()) >= 3
    assert stream.counts["no_answer"] >= 3 * (NUM_ROWS // 7)
    if not packing:
        assert numbers(stream, steps) == (kept * 4)[: 40 * BATCH]


def test_steps_are_the_same_at_every_world_size(source: Path, cache: Path) -> None:
    def of(world_size: int) -> list[list[Any]]:
        ranks = []
        for rank in range(world_size):
            stream = open_stream(config(source, cache))
            stream.seek(1, None)
            ranks.append(take(loader(stream, rank, world_size), 1, 15))
        return [[row for rank in ranks for row in rank[step][0]] for step in range(15)]

    assert of(1) == of(2) == of(4)


def test_the_first_rows_alone_are_an_epoch(source: Path, cache: Path) -> None:
    stream = open_stream(config(source, cache, max_rows=5, packing=False))
    stream.seek(1, None)
    assert numbers(stream, take(loader(stream), 1, 5)) == [0, 1, 2, 3, 4] * 4


def test_a_moved_file_is_gone_on_with_and_another_one_begun(
    source: Path, cache: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stream = open_stream(config(source, cache))
    stream.seek(1, None)
    reads = loader(stream)
    ((_, _, position),) = take(reads, 1, 1)
    ((wanted, _, _),) = take(reads, 2, 1)
    moved = open_stream(config(source.rename(tmp_path / "moved [1].jsonl"), cache))
    moved.seek(2, position)
    assert take(loader(moved), 2, 1)[0][0] == wanted
    other = open_stream(config(write_rows(tmp_path / "other.jsonl", range(100, 150)), cache, packing=False))
    with caplog.at_level(logging.WARNING, "app"):
        other.seek(2, position)
    assert "step 2: the trainer state names no place in data.source" in caplog.text
    assert numbers(other, take(loader(other), 2, 1)) == [100, 101, 102, 103]


def test_parquet_is_streamed_alike(source: Path, cache: Path, tmp_path: Path) -> None:
    import pyarrow.json
    import pyarrow.parquet

    table = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.json.read_json(source), table, row_group_size=8)
    steps = []
    for path in (source, table):
        stream = open_stream(config(path, cache))
        stream.seek(1, None)
        steps.append([(rows, labels) for rows, labels, _ in take(loader(stream), 1, 15)])
    assert steps[0] == steps[1]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "holds no row"),
        ('{"conversations": []}\n', r"row 1: conversations=\[\] must be a list of turns"),
        (
            '{"conversations": [{"from": "user", "value": "a"}]}\n',
            r"no conversation of a whole epoch .*seq_len=64",
        ),
        ('{"question": "a"}\n', r"has the columns \['question'\]"),
    ],
    ids=["empty", "wrong row", "no answer", "wrong columns"],
)
def test_a_source_that_gives_nothing_is_one_error(cache: Path, tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text(text)

    def first_step() -> None:
        stream = open_stream(config(path, cache))
        stream.seek(1, None)
        loader(stream).take(1)

    with pytest.raises(ConfigError, match=words):
        first_step()


def test_a_line_that_is_not_json_is_an_error_that_names_the_source(cache: Path, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "bad.jsonl", range(3))
    path.write_text(path.read_text() + "{oops\n")
    stream = open_stream(config(path, cache))
    stream.seek(1, None)
    with pytest.raises(ConfigError, match=r"bad\.jsonl' cannot be read"):
        take(loader(stream), 1, 3)


def test_what_a_rank_sees_of_a_stream_changes_with_its_rows(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "many.jsonl", range(1000))
    data = config(source, cache).data
    seen = [seen_of_stream(data)]
    source.write_text(source.read_text() + "\n")  # beyond the beginning that the fingerprint is taken of
    seen.append(seen_of_stream(data))
    source.write_text(source.read_text().replace("number 0", "number 1"))
    seen.append(seen_of_stream(data))
    source.unlink()
    seen.append(seen_of_stream(data))
    assert "nothing (FileNotFoundError" in seen[-1]
    hub = config(Path("some/set"), cache).data
    for revision in ("aa", "bb"):
        builder = SimpleNamespace(hash=revision)
        monkeypatch.setattr("datasets.load_dataset_builder", lambda name, found=builder: found)
        seen.append(seen_of_stream(hub))
    assert len(set(seen)) == 6


def test_a_stream_that_another_rank_sees_otherwise_is_not_opened(
    source: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.stream.from_every_rank", lambda mine, wait_s: [mine, mine, "nothing (gone)"])
    with pytest.raises(ConfigError, match=r"rank 2 sees nothing \(gone\), and rank 0 a file of \d+ bytes"):
        open_stream(config(source, cache))
    monkeypatch.setattr("app.stream.from_every_rank", lambda mine, wait_s: [mine, mine])
    open_stream(config(source, cache))


def test_a_stream_that_stalls_is_an_error_that_names_its_source(source: Path, cache: Path) -> None:
    answers = Event()

    class Stalls(Stream):
        def window(self, step: int) -> Window:
            answers.wait(20)
            raise AssertionError(f"step {step} is not waited for any more")

    opened = open_stream(config(source, cache))
    stream = Stalls(opened._config, opened.tokenizer, opened._open)
    reads = StepLoader(stream, rank=0, world_size=1, micro_batch=1, last_step=9, wait_s=0.05)
    with pytest.raises(StorageError) as caught:
        reads.take(1)
    assert f"within data.wait_s=0.05 s: look after data.source='{source}'" in str(caught.value)
    assert "data.cache" not in str(caught.value)
    reads.close()
    answers.set()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"data": {"source": "bundled", "streaming": True}}, "streaming=true with data.source='bundled'"),
        ({"train": {"epochs": 2, "global_batch": 4}}, "how long train.epochs=2 is: give train.steps"),
    ],
)
def test_what_a_stream_cannot_know_is_refused(change: dict[str, Any], words: str) -> None:
    settings = {
        "model": {"config": {"model_type": "qwen2"}},
        "data": {"source": "rows.jsonl", "streaming": True},
        "train": {"steps": 3, "global_batch": 4},
    }
    with pytest.raises(ConfigError, match=words):
        parse(settings | change)


def test_a_stream_with_its_own_tokenizer_keeps_nothing_on_disk() -> None:
    settings: dict[str, Any] = {
        "run": {"storage": "s3://bucket/runs"},
        "model": {"path": "/models/gpt2"},
        "data": {"source": "rows.jsonl"},
        "train": {"steps": 3, "global_batch": 4},
    }
    with pytest.raises(ConfigError, match=r"set data\.cache"):
        parse(settings)
    settings["data"]["streaming"] = True
    parse(settings)
    settings["model"]["tokenizer"] = "bundled"
    with pytest.raises(ConfigError, match=r"set data\.cache"):
        parse(settings)
