import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from app import bundled, data
from app.config import Config, parse
from app.data import Dataset, open_dataset
from app.forward import answer_loss, packed_logits
from app.packing import attention_masks, block_diagonal_mask, pack, positions_and_documents
from app.tokens import IGNORED, Counts, Document, documents, load_tokenizer, render
from layercheck.errors import ConfigError
from tests.small_models import SHAPES

TALK = {
    "conversations": [{"from": "user", "value": "Hi there"}, {"from": "assistant", "value": "Good morning"}]
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("data")


def config(cache: Path, **data_keys: object) -> Config:
    return parse(
        {
            "run": {"storage": str(cache)},
            "model": {"config": {"model_type": "qwen2"}, "vocab_size": 400},
            "data": {"seq_len": 400, "max_rows": 60, "cache": str(cache), **data_keys},
            "train": {"steps": 1, "global_batch": 4},
            "cluster": {"workers": 1},
        }
    )


@pytest.fixture(scope="module")
def dataset(cache: Path) -> Dataset:
    return open_dataset(config(cache))


def test_the_bundled_text_is_real_and_large() -> None:
    rows = bundled.rows()
    text = " ".join(row["conversations"][1]["value"] for row in rows)
    assert len(rows) > 1000
    assert len(text) > 300_000
    assert "The simple form" in text


def test_the_bundled_tokenizer_is_the_same_in_another_process(tmp_path: Path) -> None:
    code = "import sys; from app import bundled; from pathlib import Path; "
    code += "bundled.build_tokenizer(Path(sys.argv[1]), 400)"
    for name, hash_seed in (("one", "1"), ("two", "2")):
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / name)],
            check=True,
            timeout=120,
            env={**os.environ, "PYTHONHASHSEED": hash_seed},
        )
    files = [sorted((tmp_path / name).rglob("*.json")) for name in ("one", "two")]
    assert [file.name for file in files[0]] == [file.name for file in files[1]]
    assert len(files[0]) >= 2
    assert all(one.read_bytes() == two.read_bytes() for one, two in zip(*files, strict=True))


def test_the_bundled_tokenizer_loads_like_any_other_and_gives_the_text_back(cache: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(str(bundled.build_tokenizer(cache, 400)))
    text = 'The "assert" statement\n  if __debug__: caf\u00e9 <|end|>'
    assert len(tokenizer) == 400
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode("<|end|>") == [tokenizer.eos_token_id]


def test_the_bundled_tokenizer_gives_the_same_ids_beside_a_qwen2_model(cache: Path, tmp_path: Path) -> None:
    folder = bundled.build_tokenizer(cache, 400)
    Qwen2Config().save_pretrained(tmp_path)
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    plain, beside = (AutoTokenizer.from_pretrained(str(place)) for place in (folder, tmp_path))
    text = "The assert 1234 statement\n   x == y"
    assert plain.encode(text) == beside.encode(text)
    assert len(plain) == len(beside) == 400
    assert plain.chat_template == beside.chat_template == bundled.CHAT_TEMPLATE


def test_labels_lie_on_the_answers_and_nowhere_else(cache: Path) -> None:
    tokenizer = load_tokenizer(config(cache), cache)
    talk = [
        {"role": "system", "content": "Be short."},
        {"role": "user", "content": "First question"},
        {"role": "assistant", "content": "First answer"},
        {"role": "user", "content": "Second question"},
        {"role": "assistant", "content": "Second answer"},
    ]
    (document,) = documents([talk], tokenizer, 200, Counts())
    learnt = [token for token in document.labels if token != IGNORED]
    assert tokenizer.decode(learnt) == "First answer<|end|>\nSecond answer<|end|>\n"
    assert all(
        label in (IGNORED, token) for token, label in zip(document.input_ids, document.labels, strict=True)
    )


def test_a_turn_that_the_template_rewrites_later_is_not_learnt(cache: Path) -> None:
    tokenizer = load_tokenizer(config(cache), cache)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role != 'assistant' or loop.last %}[{{ m.role }}]{{ m.content }}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    talk = [
        {"role": "user", "content": "Q1"},
        {"role": "assistant", "content": "A1"},
        {"role": "user", "content": "Q2"},
        {"role": "assistant", "content": "A2"},
    ]
    text, spans = render(talk, tokenizer)
    assert [text[begin:end] for begin, end in spans] == ["A2"]


def test_what_is_cut_off_or_left_out_is_counted(cache: Path) -> None:
    tokenizer = load_tokenizer(config(cache), cache)
    long = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "word " * 50}]
    unseen = [{"role": "user", "content": "word " * 50}, {"role": "assistant", "content": "Ho"}]
    counts = Counts()
    kept = list(documents([long, unseen, long], tokenizer, 24, counts))
    assert [len(document.input_ids) for document in kept] == [24, 24]
    assert (counts.documents, counts.truncated, counts.no_answer) == (3, 3, 1)
    assert counts.truncated_tokens > 60


def _document(length: int, first: int) -> Document:
    ids = list(range(first, first + length))
    return Document(ids, [IGNORED, *ids[1:]])


def test_packing_keeps_every_document_whole_and_once() -> None:
    lengths = [5, 9, 3, 7, 2, 2, 10, 1, 6, 4]
    all_documents = [_document(length, 100 * index + 1) for index, length in enumerate(lengths)]
    packed = list(pack(all_documents, 10))
    found = []
    for place in packed:
        assert sum(place.lengths) == len(place.input_ids) == len(place.labels) <= 10
        start = 0
        for length in place.lengths:
            found.append(place.input_ids[start : start + length])
            start += length
    assert sorted(found) == sorted(document.input_ids for document in all_documents)
    assert len(packed) <= 6
    assert [place.lengths for place in pack(all_documents, 10, packing=False)] == [[n] for n in lengths]


def test_positions_begin_again_with_each_document_and_padding_is_one_of_its_own() -> None:
    positions, numbers = positions_and_documents([3, 2], 7)
    assert positions.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert numbers.tolist() == [0, 0, 0, 1, 1, 2, 2]


def test_the_mask_is_causal_and_never_crosses_a_document() -> None:
    mask = block_diagonal_mask(torch.tensor([[0, 0, 1, 1]]), torch.float32)[0, 0]
    seen = (mask == 0).int().tolist()
    assert seen == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]


def _model(attention: str) -> Qwen2ForCausalLM:
    torch.manual_seed(0)
    shape = Qwen2Config(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation=attention,
    )
    return Qwen2ForCausalLM(shape).eval()


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_a_packed_document_has_the_logits_that_it_has_alone(dataset: Dataset, attention: str) -> None:
    model = _model(attention)
    index = next(i for i in range(len(dataset)) if len(set(dataset.batch([i]).documents[0].tolist())) > 2)
    batch = dataset.batch([index, 0])
    with torch.no_grad():
        packed = packed_logits(model, batch, attention)[0]
        for number in batch.documents[0].unique():
            where = batch.documents[0] == number
            alone = model(input_ids=batch.input_ids[:1, where], use_cache=False).logits[0]
            torch.testing.assert_close(packed[where], alone, rtol=1e-4, atol=1e-5)


def test_the_loss_is_the_mean_over_answer_tokens_of_all_micro_batches(dataset: Dataset) -> None:
    model = _model("sdpa")
    with torch.no_grad():
        whole = answer_loss(model, dataset.batch([0, 1, 2, 3]), "sdpa", dataset.label_count([0, 1, 2, 3]))
        share = dataset.label_count([0, 1, 2, 3]) / 2
        parts = [answer_loss(model, dataset.batch(part), "sdpa", share) for part in ([0, 1], [2, 3])]
        batch = dataset.batch([2])
        own = model(
            input_ids=batch.input_ids,
            labels=batch.labels,
            position_ids=batch.position_ids,
            attention_mask=block_diagonal_mask(batch.documents, model.dtype),
            use_cache=False,
        ).loss
        mine = answer_loss(model, batch, "sdpa", dataset.label_count([2]))
    torch.testing.assert_close(sum(parts) / 2, whole)
    torch.testing.assert_close(mine, own)


def test_label_counts_are_those_of_the_batches(dataset: Dataset) -> None:
    labels = dataset.batch([3, 1]).labels
    assert dataset.label_count([3, 1]) == int((labels != IGNORED).sum()) > 0


def test_data_is_built_once_and_reused(
    cache: Path, dataset: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_build(*_: object) -> None:
        raise AssertionError("built again")

    monkeypatch.setattr(data, "_build", no_build)
    again = open_dataset(config(cache))
    assert torch.equal(again.batch([0]).input_ids, dataset.batch([0]).input_ids)
    assert again.counts == dataset.counts
    for change in ({"seq_len": 80}, {"max_rows": 50}, {"packing": False}):
        with pytest.raises(AssertionError, match="built again"):
            open_dataset(config(cache, **change))


def test_a_crash_while_data_is_built_leaves_nothing_that_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = data._write

    def cut(path: Path, *rest: object) -> None:
        whole(path, *rest)
        path.write_bytes(path.read_bytes()[:100])
        raise KeyboardInterrupt

    monkeypatch.setattr(data, "_write", cut)
    with pytest.raises(KeyboardInterrupt):
        open_dataset(config(tmp_path))
    assert not list(tmp_path.glob("*.arrow"))
    monkeypatch.undo()
    assert len(open_dataset(config(tmp_path))) > 5


def test_data_without_any_answer_in_reach_is_one_error(tmp_path: Path) -> None:
    source = tmp_path / "talk.jsonl"
    source.write_text(json.dumps(TALK) + "\n")
    with pytest.raises(ConfigError, match=r"none of 1 conversations.*seq_len=8"):
        open_dataset(config(tmp_path, source=str(source), seq_len=8))


def test_a_tokenizer_that_does_not_exist_is_one_error(tmp_path: Path) -> None:
    settings = config(tmp_path)
    wrong = settings.model_copy(update={"model": settings.model.model_copy(update={"tokenizer": "./absent"})})
    with pytest.raises(ConfigError, match=r"model\.tokenizer='\./absent'"):
        open_dataset(wrong)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma", "gemma3_text", "mistral", "qwen2_moe"])
def test_a_packed_document_has_its_own_logits_in_every_family(dataset: Dataset, family: str) -> None:
    torch.manual_seed(0)
    shape = AutoConfig.for_model(**SHAPES[family], vocab_size=400, pad_token_id=0, bos_token_id=1)
    model = AutoModelForCausalLM.from_config(shape).eval()
    index = next(i for i in range(len(dataset)) if len(set(dataset.batch([i]).documents[0].tolist())) > 2)
    batch = dataset.batch([index])
    with torch.no_grad():
        packed = packed_logits(model, batch, "sdpa")[0]
        for number in batch.documents[0].unique():
            where = batch.documents[0] == number
            alone = model(input_ids=batch.input_ids[:1, where], use_cache=False).logits[0]
            assert number > 0 or len(alone) > 24, "longer than the window of a sliding layer"
            torch.testing.assert_close(packed[where], alone, rtol=1e-4, atol=1e-5)


def test_a_model_with_two_kinds_of_layers_gets_a_mask_for_each() -> None:
    documents_ = torch.tensor([[0, 0, 0, 0, 1, 1]])
    mixed = SimpleNamespace(sliding_window=2, layer_types=["sliding_attention", "full_attention"])
    mixed.get_text_config = lambda: mixed
    masks = attention_masks(documents_, torch.float32, mixed)
    assert torch.equal(masks["full_attention"], block_diagonal_mask(documents_, torch.float32))
    seen = (masks["sliding_attention"][0, 0] == 0).int().tolist()
    assert seen == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0],
        [0, 1, 1, 0, 0, 0],
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]
    mixed.sliding_window = 6
    assert torch.equal(attention_masks(documents_, torch.float32, mixed), masks["full_attention"])
