"""A model, a tokenizer and data that do not belong together: one clear error each."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.config import Config, parse
from app.data import open_dataset
from app.shape import model_shape
from app.tokens import load_tokenizer
from layercheck.errors import ConfigError
from tests.samples import MEDQA, OPENTHOUGHTS
from tests.small_models import SHAPES, make_folder

GEMMA_LIKE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}<start>{{ m.role }} {{ m.content }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<start>assistant {% endif %}"
)


def config(folder: Path, data: dict[str, Any] | None = None, **model: Any) -> Config:
    keys = model or {"path": str(folder / "model")}
    return parse(
        {
            "run": {"storage": str(folder)},
            "model": keys,
            "data": {"source": str(OPENTHOUGHTS), "seq_len": 256, "cache": str(folder / "data")}
            | (data or {}),
            "train": {"steps": 1, "global_batch": 2},
            "cluster": {"workers": 1},
        }
    )


def _check(settings: Config, folder: Path) -> Any:
    return model_shape(settings, load_tokenizer(settings, folder))


def test_a_model_and_its_own_tokenizer_fit(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    shape = _check(config(tmp_path), tmp_path)
    assert shape.model_type == "qwen2"


def test_dropout_is_put_into_every_family(tmp_path: Path) -> None:
    shape = _check(config(tmp_path, config=SHAPES["gpt2"], dropout=0.25), tmp_path)
    assert (shape.resid_pdrop, shape.embd_pdrop, shape.attn_pdrop) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ({"vocab_size": 400}, {}, r"bundled' has \d+ tokens, the model only 400.*model\.tokenizer"),
        ({"max_position_embeddings": 128}, {}, r"data\.seq_len=256 is above the 128 positions"),
        ({"layer_types": ["full_attention", "linear_attention"]}, {}, r"linear_attention.*across documents"),
        ({"model_type": "no_such_model"}, {}, r"model\.config=.*no_such_model"),
    ],
)
def test_a_model_that_does_not_fit_is_one_error(
    tmp_path: Path, model: dict[str, Any], data: dict[str, Any], words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        _check(config(tmp_path, data, config=SHAPES["qwen2"] | model), tmp_path)


def test_a_tokenizer_without_a_template_is_refused_and_takes_one_that_is_named(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    with pytest.raises(ConfigError, match=r"no chat template.*model\.chat_template to chatml"):
        open_dataset(config(tmp_path))
    path = str(tmp_path / "model")
    assert len(open_dataset(config(tmp_path, path=path, chat_template="chatml"))) > 0
    own = tmp_path / "own.jinja"
    own.write_text(GEMMA_LIKE)
    assert (
        "<start>"
        in load_tokenizer(config(tmp_path, path=path, chat_template=str(own)), tmp_path).chat_template
    )
    with pytest.raises(ConfigError, match=r"model\.chat_template='absent' is neither chatml nor a file"):
        open_dataset(config(tmp_path, path=path, chat_template="absent"))


def test_a_template_without_a_system_role_is_one_error_and_takes_merged_prompts(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    own = tmp_path / "own.jinja"
    own.write_text(GEMMA_LIKE)
    keys = {"path": str(tmp_path / "model"), "chat_template": str(own)}
    with pytest.raises(
        ConfigError, match=r"roles \['system', 'user', 'assistant'\].*not supported.*data\.system to merge"
    ):
        open_dataset(config(tmp_path, **keys))
    texts = {}
    for choice in ("merge", "drop"):
        made = open_dataset(config(tmp_path, {"system": choice}, **keys))
        ids = made.batch(list(range(len(made)))).input_ids
        texts[choice] = "".join(made.tokenizer.batch_decode(ids))
    assert "<start>user Think about each question" in texts["merge"]
    assert "Think about each question" not in texts["drop"]


def test_labels_that_are_all_masked_are_one_error(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    own = tmp_path / "own.jinja"
    own.write_text(
        "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}Now:{% endif %}"
    )
    keys = {"path": str(tmp_path / "model"), "chat_template": str(own)}
    with pytest.raises(ConfigError, match=r"none of 12 conversations has an answer.*model\.chat_template"):
        open_dataset(config(tmp_path, {"seq_len": 512}, **keys))


def test_an_empty_file_is_one_error(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(ConfigError, match=r"empty\.jsonl' holds no row"):
        open_dataset(config(tmp_path, {"source": str(empty)}))


def test_the_samples_are_read_in_their_schemas(tmp_path: Path) -> None:
    make_folder(tmp_path / "model")
    for source, schema in ((MEDQA, "medqa"), (OPENTHOUGHTS, "openthoughts")):
        for named in ("auto", schema):
            made = open_dataset(config(tmp_path, {"source": str(source), "schema": named, "seq_len": 512}))
            assert made.counts["documents"] == 12
            assert made.counts["no_answer"] == made.counts["truncated"] == 0


def test_the_public_variants_of_an_exam_give_the_same_conversations(tmp_path: Path) -> None:
    from app.config import DataConfig
    from app.sources import conversations

    rows = [json.loads(line) for line in MEDQA.read_text().splitlines()]
    variants = {
        "medqa_hf": [
            {
                "id": str(number),
                "sent1": row["question"],
                "sent2": "",
                **{f"ending{index}": text for index, text in enumerate(row["options"].values())},
                "label": "ABCD".index(row["answer_idx"]),
            }
            for number, row in enumerate(rows)
        ],
        "bigbio_qa": [
            {
                "question": row["question"],
                "type": "multiple_choice",
                "choices": list(row["options"].values()),
                "context": "",
                "answer": [row["answer"]],
            }
            for row in rows
        ],
    }
    wanted = list(conversations(DataConfig(source=str(MEDQA))))
    for name, written in variants.items():
        source = tmp_path / f"{name}.jsonl"
        source.write_text("".join(json.dumps(row) + "\n" for row in written))
        for schema in ("auto", name):
            assert list(conversations(DataConfig(source=str(source), schema=schema))) == wanted  # type: ignore[arg-type]
    wrong = tmp_path / "wrong.jsonl"
    wrong.write_text(json.dumps(variants["medqa_hf"][0] | {"label": 4}) + "\n")
    with pytest.raises(ConfigError, match="row 1: label=4 is none of the 4 endings"):
        list(conversations(DataConfig(source=str(wrong))))
