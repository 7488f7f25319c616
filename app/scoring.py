"""What a model says: the likelihood of given answers and the text that it writes greedily."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig

from app.grading import ReplyScore
from app.schemas import Message
from app.shape import check_vocabulary, position_limit
from app.tokens import IGNORED, Document, read_tokenizer, tokenised
from layercheck.errors import ConfigError


@dataclass(frozen=True)
class Loaded:
    """A model ready to be asked. `limit` is the most tokens that it takes, None without a limit."""

    model: Any
    tokenizer: Any
    limit: int | None


def load(folder: str, dtype: str, device: str, chat_template: str | None) -> Loaded:
    """Reads a Hugging Face folder; nothing is looked up in the network.

    Args:
        folder: such as `layercheck export --to hf` or `save_pretrained` leaves.
        dtype: `float32`, `bfloat16`, `float16`, or `auto` for that of the folder.
        device: where to compute, `auto` for the first accelerator, else the CPU.
        chat_template: as `model.chat_template`.

    Raises:
        ConfigError: the folder is no model with a tokenizer, or they do not belong together.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"--model {folder} is not a folder; `layercheck export --to hf` writes one")
    tokenizer = read_tokenizer(folder, f"the tokenizer of --model {folder}", chat_template)
    try:
        shape = AutoConfig.from_pretrained(folder, local_files_only=True)
        kind = "auto" if dtype == "auto" else getattr(torch, dtype)
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=kind, local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--model {folder} cannot be loaded: {error}") from None
    check_vocabulary(shape, tokenizer, f"of --model {folder}")
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    return Loaded(model.to(where).eval(), tokenizer, position_limit(shape))


def documents_of(loaded: Loaded, talks: list[list[Message]]) -> list[Document]:
    """Tokenised conversations whose last turn is the answer; only that one has labels.

    Raises:
        ConfigError: the chat template marks no answer.
    """
    found = [_last_answer(document) for document in tokenised(talks, loaded.tokenizer)]
    if any(set(document.labels) == {IGNORED} for document in found):
        raise ConfigError(
            "the chat template gives no place for an answer after its generation prompt: choose another one "
            "by --chat-template"
        )
    return found


def _last_answer(document: Document) -> Document:
    """Labels of earlier answers are taken away: the last run of labels is the answer that is asked for."""
    labels = list(document.labels)
    end = max((index for index, label in enumerate(labels) if label != IGNORED), default=-1)
    begin = end
    while begin >= 0 and labels[begin] != IGNORED:
        begin -= 1
    return Document(document.input_ids, [IGNORED] * (begin + 1) + labels[begin + 1 :])


def fits(loaded: Loaded, document: Document) -> bool:
    """Whether the model has enough positions for the document."""
    return loaded.limit is None or len(document.input_ids) <= loaded.limit


@torch.inference_mode()
def answer_scores(
    loaded: Loaded, documents: Sequence[Document], num_chars: Sequence[int]
) -> list[ReplyScore]:
    """Log-likelihood of the labelled tokens of each document, each given all tokens before it.

    Args:
        loaded: the model.
        documents: computed as one batch, padded at the right.
        num_chars: characters of each answer.
    """
    ids = [torch.tensor(document.input_ids) for document in documents]
    padded = pad_sequence(ids, batch_first=True, padding_value=loaded.tokenizer.pad_token_id or 0)
    mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
    device = loaded.model.device
    logits = loaded.model(input_ids=padded.to(device), attention_mask=mask.to(device)).logits
    scores = []
    for row, document, chars in zip(logits, documents, num_chars, strict=True):
        labels = torch.tensor(document.labels, device=device)
        places = (labels != IGNORED).nonzero().flatten()
        logprobs = row[places - 1].float().log_softmax(-1)  # a token is foretold by the one before it
        chosen = logprobs.gather(1, labels[places, None])
        scores.append(ReplyScore(float(chosen.double().sum()), len(places), chars))
    return scores


def room_for(loaded: Loaded, talk: list[Message], most: int) -> int:
    """How many tokens the model can write after a conversation, at most `most`."""
    if loaded.limit is None:
        return most
    return min(
        most, loaded.limit - len(loaded.tokenizer(_prompt(loaded, talk), add_special_tokens=False).input_ids)
    )


def _prompt(loaded: Loaded, talk: list[Message]) -> str:
    return str(loaded.tokenizer.apply_chat_template(talk, tokenize=False, add_generation_prompt=True))


@torch.inference_mode()
def write(loaded: Loaded, talks: Sequence[list[Message]], max_new_tokens: int) -> list[str]:
    """What the model writes after each conversation, always the likeliest token, until its turn ends."""
    tokenizer = loaded.tokenizer
    prompts = [_prompt(loaded, talk) for talk in talks]
    inputs = tokenizer(
        prompts, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    stop = turn_end(tokenizer)
    # The folder's own generation settings (temperature, repetition penalty) would not be greedy.
    settings = GenerationConfig(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=[tokenizer.eos_token_id] if tokenizer.eos_token_id is not None else None,
        stop_strings=[stop] if stop else None,
    )
    made = loaded.model.generate(
        input_ids=inputs["input_ids"].to(loaded.model.device),
        attention_mask=inputs["attention_mask"].to(loaded.model.device),
        generation_config=settings,
        tokenizer=tokenizer,
    )
    texts = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=False)
    return [_until(text, [stop, tokenizer.eos_token, tokenizer.pad_token]) for text in texts]


def turn_end(tokenizer: Any) -> str:
    """The text by which the chat template ends an answer, without spaces around it; may be empty."""
    mark = "ANSWER"
    talk = [{"role": "user", "content": "Q"}, {"role": "assistant", "content": mark}]
    whole = str(tokenizer.apply_chat_template(talk, tokenize=False))
    return whole.rsplit(mark, 1)[-1].strip()


def _until(text: str, ends: list[str | None]) -> str:
    for end in ends:
        if end:
            text = text.split(end, 1)[0]
    return text.strip()
