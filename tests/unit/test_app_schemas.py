import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from app.config import DataConfig
from app.schemas import choose_schema, read_medqa, read_openthoughts
from app.sources import check_source, conversations, source_fingerprint
from layercheck.errors import ConfigError

TALK = {
    "system": "Be short.",
    "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}],
}
EXAM = {"question": "Which?", "options": {"A": "one", "B": "two"}, "answer": "two", "answer_idx": "B"}


def _jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def test_openthoughts_roles_of_both_dialects_become_user_and_assistant() -> None:
    assert read_openthoughts(TALK) == [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
    ]
    other = {"conversations": [{"from": "user", "value": "Hi"}, {"from": "assistant", "value": "Ho"}]}
    assert read_openthoughts(other) == read_openthoughts(TALK)[1:]


@pytest.mark.parametrize(
    "options",
    [
        {"A": "one", "B": "two"},
        {"A": "one", "B": "two", "C": None},
        ["one", "two"],
        [{"key": "A", "value": "one"}, {"key": "B", "value": "two"}],
    ],
)
@pytest.mark.parametrize("answer", [{"answer_idx": "B"}, {}, {"answer": ["two"]}])
def test_medqa_options_of_every_form_give_the_same_conversation(
    options: object, answer: dict[str, object]
) -> None:
    row = {"question": "Which?", "options": options, "answer": "two", **answer}
    assert read_medqa(row) == [
        {"role": "user", "content": "Which?\n\nA. one\nB. two"},
        {"role": "assistant", "content": "B. two"},
    ]


def test_auto_takes_the_schema_whose_columns_are_there() -> None:
    assert choose_schema(["system", "conversations"], "auto", "x") == "openthoughts"
    assert choose_schema(["question", "options", "answer", "answer_idx"], "auto", "x") == "medqa"


def test_missing_columns_are_one_error_with_file_columns_found_and_needed(tmp_path: Path) -> None:
    source = _jsonl(tmp_path / "wrong.jsonl", {"text": "a", "label": 1})
    with pytest.raises(ConfigError, match=r"wrong\.jsonl.*\['label', 'text'\].*conversations.*question"):
        check_source(DataConfig(source=source))
    with pytest.raises(ConfigError, match=r"\['question', 'options', 'answer'\] \(medqa\)"):
        check_source(DataConfig(source=_jsonl(tmp_path / "talk.jsonl", TALK), schema="medqa"))


def test_jsonl_and_parquet_give_the_same_conversations(tmp_path: Path) -> None:
    for name, row in (("talk", TALK), ("exam", EXAM)):
        text = DataConfig(source=_jsonl(tmp_path / f"{name}.jsonl", row, row, row))
        pq.write_table(pa.Table.from_pylist([row] * 3), tmp_path / f"{name}.parquet")
        binary = DataConfig(source=str(tmp_path / f"{name}.parquet"))
        assert list(conversations(text)) == list(conversations(binary))
        assert len(list(conversations(text))) == 3


def test_a_file_that_is_empty_absent_or_broken_is_named(tmp_path: Path) -> None:
    pq.write_table(pa.table({"conversations": pa.array([], pa.string())}), tmp_path / "none.parquet")
    (tmp_path / "noise.parquet").write_bytes(b"not a table")
    (tmp_path / "noise.jsonl").write_text('{"conversations": []}\n{oops\n')
    for source, words in (
        (_jsonl(tmp_path / "none.jsonl"), "holds no row"),
        (str(tmp_path / "none.parquet"), "holds no row"),
        (str(tmp_path / "absent.jsonl"), "is not a file"),
        (str(tmp_path / "noise.parquet"), "is not a Parquet file"),
    ):
        with pytest.raises(ConfigError, match=words) as caught:
            check_source(DataConfig(source=source))
        assert source in str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"conversations": [{"from": "robot", "value": "x"}]}, "robot"),
        ({"conversations": [{"role": "user"}]}, "keys from and value"),
        ({"conversations": "text"}, "list of turns"),
        ({**EXAM, "answer_idx": "Z"}, "answer_idx='Z'"),
        ({**EXAM, "answer_idx": None, "answer": "three"}, "answer='three'"),
        ({**EXAM, "options": {"A": "one"}}, "at least two"),
    ],
)
def test_a_wrong_row_is_named_by_its_number(tmp_path: Path, row: dict[str, object], words: str) -> None:
    good = TALK if "conversations" in row else EXAM
    source = _jsonl(tmp_path / "rows.jsonl", good, row)
    with pytest.raises(ConfigError, match=words) as caught:
        list(conversations(DataConfig(source=source)))
    assert "row 2" in str(caught.value)


def test_a_line_that_is_not_json_is_named_by_its_number(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(TALK) + "\n{oops\n")
    with pytest.raises(ConfigError, match="line 2 is not JSON"):
        list(conversations(DataConfig(source=str(path))))


def test_a_file_counts_by_its_bytes_wherever_it_lies(tmp_path: Path) -> None:
    (tmp_path / "moved").mkdir()
    here = DataConfig(source=_jsonl(tmp_path / "a.jsonl", TALK))
    moved = DataConfig(source=_jsonl(tmp_path / "moved" / "b.jsonl", TALK))
    changed = DataConfig(source=_jsonl(tmp_path / "c.jsonl", TALK, TALK))
    assert source_fingerprint(here) == source_fingerprint(moved) != source_fingerprint(changed)
