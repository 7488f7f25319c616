"""`python -m app.evaluate` on a small random model: its numbers are those of a plain computation by hand."""

import json
import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from app.evaluate import main
from app.schemas import read_exam
from app.scoring import Loaded, answer_scores, documents_of, load, turn_end, write
from layercheck.errors import ConfigError
from tests.samples import MEDQA, OPENTHOUGHTS
from tests.small_models import make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_folder(tmp_path_factory.mktemp("evaluate") / "model")


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Loaded:
    return load(str(folder), "float32", "cpu", None)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _score(folder: Path, data: Path, out: Path, *arguments: str) -> dict[str, Any]:
    call = ["--model", str(folder), "--data", str(data), "--json", str(out), "--device", "cpu"]
    assert main([*call, *arguments]) == 0
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def _by_hand(loaded: Loaded, question: str, reply: str) -> float:
    """Sum over the reply's tokens, one forward pass, no padding."""
    tokenizer = loaded.tokenizer
    asked = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True, tokenize=False)
    whole = tokenizer.apply_chat_template([*asked, {"role": "assistant", "content": reply}], tokenize=False)
    ids = tokenizer.encode(whole, add_special_tokens=False)
    begin = len(tokenizer.encode(prompt, add_special_tokens=False))
    with torch.no_grad():
        logprobs = loaded.model(torch.tensor([ids])).logits[0].log_softmax(-1)
    return sum(float(logprobs[place - 1, ids[place]]) for place in range(begin, len(ids)))


def test_a_reply_is_scored_by_the_sum_over_its_tokens_whatever_stands_beside_it(loaded: Loaded) -> None:
    exam = read_exam(_rows(MEDQA)[0])
    asked = {"role": "user", "content": exam.question}
    talks = [[asked, {"role": "assistant", "content": reply}] for reply in exam.replies]
    documents = documents_of(loaded, talks)
    lengths = {len(document.input_ids) for document in documents}
    assert len(lengths) > 1, "the batch has padding"
    together = answer_scores(loaded, documents, [1] * 4)
    for score, reply in zip(together, exam.replies, strict=True):
        assert score.logprob == pytest.approx(_by_hand(loaded, exam.question, reply), rel=1e-5)


def test_the_answer_that_is_asked_for_is_the_last_one(loaded: Loaded) -> None:
    talk = [
        {"role": "user", "content": "One?"},
        {"role": "assistant", "content": "First answer"},
        {"role": "user", "content": "Two?"},
        {"role": "assistant", "content": "Second answer"},
    ]
    (document,) = documents_of(loaded, [talk])
    learnt = [token for token in document.labels if token >= 0]
    assert loaded.tokenizer.decode(learnt) == "Second answer<|end|>\n"


def test_an_exam_gives_the_accuracy_of_its_likeliest_replies(
    folder: Path, loaded: Loaded, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exams = [read_exam(row) for row in _rows(MEDQA)]
    hits, nll, tokens = 0, 0.0, 0
    for exam in exams:
        sums = [_by_hand(loaded, exam.question, reply) for reply in exam.replies]
        hits += sums.index(max(sums)) == exam.right
        nll -= sums[exam.right]
        tokens += len(loaded.tokenizer.encode(f"{exam.replies[exam.right]}<|end|>\n"))
    found = _score(folder, MEDQA, tmp_path / "a.json")
    assert found["accuracy"] == hits / len(exams)
    assert (found["schema"], found["rows"], found["too_long"]) == ("medqa", len(exams), 0)
    assert found["answer_nll"] == pytest.approx(nll / tokens, rel=1e-5)
    assert f"accuracy {hits / len(exams):.4f}" in capsys.readouterr().out
    alone = _score(folder, MEDQA, tmp_path / "b.json", "--batch-size", "1")
    assert alone["accuracy"] == found["accuracy"]
    assert alone["answer_nll"] == pytest.approx(found["answer_nll"], rel=1e-5)


def test_what_is_written_is_the_likeliest_token_each_time(loaded: Loaded) -> None:
    talks = [[{"role": "user", "content": text}] for text in ("Hi", "What is a list and what is a tuple?")]
    written = write(loaded, talks, 7)
    for talk, text in zip(talks, written, strict=True):
        prompt = loaded.tokenizer.apply_chat_template(talk, add_generation_prompt=True, tokenize=False)
        ids = loaded.tokenizer.encode(prompt, add_special_tokens=False)
        made: list[int] = []
        for _ in range(7):
            with torch.no_grad():
                made.append(int(loaded.model(torch.tensor([ids + made])).logits[0, -1].argmax()))
        whole = loaded.tokenizer.decode(made)
        assert text == whole.split("<|end|>")[0].split("<|pad|>")[0].strip()


def test_the_end_of_a_turn_is_what_the_template_puts_behind_an_answer(loaded: Loaded) -> None:
    assert turn_end(loaded.tokenizer) == "<|end|>"


def test_rows_that_are_too_long_are_told_and_wrong(folder: Path, tmp_path: Path) -> None:
    long = {**_rows(MEDQA)[0], "question": "Which one? " * 600}
    source = tmp_path / "long.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in (long, *_rows(MEDQA)[:3])))
    short = make_folder(tmp_path / "short", max_position_embeddings=600)
    found = _score(short, source, tmp_path / "a.json")
    assert (found["rows"], found["too_long"]) == (4, 1)
    first_three = _score(short, MEDQA, tmp_path / "b.json", "--max-rows", "3")
    assert found["accuracy"] == pytest.approx(0.75 * first_three["accuracy"])
    assert found["answer_nll"] == pytest.approx(first_three["answer_nll"], rel=1e-5)


def test_conversations_are_matched_and_room_at_the_end_of_the_positions_is_heeded(tmp_path: Path) -> None:
    talks = _rows(OPENTHOUGHTS)[:4]
    source = tmp_path / "talks.jsonl"
    source.write_text("".join(json.dumps(row) + "\n" for row in talks))
    folder = make_folder(tmp_path / "model", "gpt2", n_positions=300)
    found = _score(folder, source, tmp_path / "a.json", "--max-new-tokens", "200")
    assert (found["schema"], found["rows"], found["exact_match"]) == ("openthoughts", 4, 0.0)
    assert 5.5 < found["answer_nll"] < 7.5, "a random model over 512 tokens: about ln 512"


def test_nothing_is_looked_up_in_the_network(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_network(*_: object, **__: object) -> None:
        raise AssertionError("the network was asked")

    monkeypatch.setattr(socket, "create_connection", no_network)
    monkeypatch.setattr(socket, "getaddrinfo", no_network)
    found = _score(folder, MEDQA, tmp_path / "a.json", "--max-rows", "1")
    assert (found["rows"], found["stderr"]) == (1, None), "one row has no standard error"


def _without_template(folder: Path) -> None:
    (folder / "chat_template.jinja").unlink()


def _small_vocabulary(folder: Path) -> None:
    from safetensors.torch import load_file, save_file

    weights = load_file(folder / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][:400].clone()
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 400}))


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (_without_template, "no chat template"),
        (_small_vocabulary, "has 512 tokens, the model only 400"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be loaded"),
        (lambda folder: (folder / "config.json").write_text("{}"), "cannot be loaded"),
    ],
)
def test_a_folder_that_cannot_be_scored_is_one_error(
    tmp_path: Path, spoil: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = make_folder(tmp_path / "model")
    spoil(folder)
    assert main(["--model", str(folder), "--data", str(MEDQA)]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "absent", "--data", str(MEDQA)], "absent is not a folder"),
        (["--model", "absent", "--data", "absent.jsonl"], "is not a file"),
        (["--model", "absent", "--data", str(MEDQA), "--max-rows", "0"], "max_rows=0"),
        (["--model", "absent", "--data", str(MEDQA), "--json", "absent/x.json"], "no folder absent"),
    ],
)
def test_wrong_arguments_are_one_error(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert words in capsys.readouterr().err


def test_a_template_without_a_place_for_answers_is_one_error(loaded: Loaded) -> None:
    silent = loaded.tokenizer.__class__.from_pretrained(loaded.tokenizer.name_or_path)
    silent.chat_template = "{{ messages | length }}"
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}]
    with pytest.raises(ConfigError, match="no place for an answer"):
        documents_of(Loaded(loaded.model, silent, None), [talk])
