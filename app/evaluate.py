"""`python -m app.evaluate`: benchmark scores of a Hugging Face folder on local data; no network, no Ray.

Rows of a MedQA schema are an exam. Each option is worded as the reply that training would have taught
(`B. Two`) and stands in the model's chat template; its score is the sum of the log-probabilities of its
tokens, the end of the turn included. `accuracy` takes the reply with the largest sum. `accuracy_norm` divides
each sum by the characters of the reply first, which takes away the advantage of short ones. Of equal scores
the first reply counts, and `ties` says how often that was needed.

Rows of the OpenThoughts schema are written answers: the model continues the conversation before the last
assistant turn, greedily. `exact_match` compares final answers (see `grading.final_answer`). `answer_nll` is
the mean negative log-likelihood per token of the right answers, in nats, for both kinds.

A row that is longer than the model allows cannot be right: `too_long` counts such rows as wrong.
"""

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from math import isnan
from pathlib import Path
from typing import Any, TypeVar

from app.config import DataConfig, parse_section
from app.grading import Graded, ReplyScore, answer_nll, exam_metrics, grade, match_metrics, unanswered
from app.schemas import EXAMS, Exam, Message, RowError, place_system, read_exam, read_openthoughts
from app.scoring import Loaded, answer_scores, documents_of, fits, load, room_for, write
from app.sources import check_source, read_rows
from layercheck.errors import ConfigError

_USAGE = 2
_PROGRESS_S = 5.0
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Asking:
    """How rows are put to the model: `batch_size` at once, `max_new_tokens` for a written answer."""

    batch_size: int = 8
    max_new_tokens: int = 256


def main(arguments: list[str] | None = None) -> int:
    """Scores one model on one file.

    Returns:
        The exit code: 0 scored, 2 the model, the data or an argument cannot be used.
    """
    args = _parser().parse_args(arguments)
    try:
        keys = {"source": args.data, "schema": args.schema, "max_rows": args.max_rows, "system": args.system}
        data = parse_section(DataConfig, keys, "arguments")
        check_source(data)
        if args.json and not Path(args.json).parent.is_dir():
            raise ConfigError(f"--json {args.json}: there is no folder {Path(args.json).parent}")
        began = time.monotonic()
        loaded = load(args.model, args.dtype, args.device, args.chat_template)
        result = evaluate(loaded, data, Asking(args.batch_size, args.max_new_tokens))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    result = {"model": args.model, "data": args.data, **result, "wall_s": time.monotonic() - began}
    if args.json:
        Path(args.json).write_text(json.dumps(_plain(result), indent=2) + "\n", encoding="utf-8")
    print(describe(result))
    return 0


def _plain(result: dict[str, Any]) -> dict[str, Any]:
    """JSON has no NaN, which stands for what a single row cannot tell."""
    return {
        key: None if isinstance(value, float) and isnan(value) else value for key, value in result.items()
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m app.evaluate", description="Score a model on local data.")
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder with a tokenizer")
    parser.add_argument("--data", required=True, metavar="FILE", help="JSONL or Parquet, or a hub id")
    parser.add_argument("--json", metavar="FILE", help="write the scores there")
    schemas = ["auto", "openthoughts", *EXAMS]
    parser.add_argument(
        "--schema", default="auto", choices=schemas, help="of the rows; auto looks at the columns"
    )
    parser.add_argument("--system", default="keep", choices=["keep", "merge", "drop"], help="as data.system")
    parser.add_argument("--max-rows", type=int, metavar="N", help="only the first rows")
    parser.add_argument("--batch-size", type=_positive, default=8, metavar="N", help="rows computed at once")
    parser.add_argument(
        "--max-new-tokens", type=_positive, default=256, metavar="N", help="longest written answer"
    )
    dtypes = ["auto", "float32", "bfloat16", "float16"]
    parser.add_argument("--dtype", default="auto", choices=dtypes, help="auto: that of the folder")
    parser.add_argument("--device", default="auto", help="auto: the first accelerator, else the CPU")
    parser.add_argument(
        "--chat-template", metavar="NAME", help="as model.chat_template: chatml or a Jinja file"
    )
    return parser


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return number


def evaluate(loaded: Loaded, data: DataConfig, asking: Asking) -> dict[str, Any]:
    """The scores of a model on the rows of a source: `schema`, `rows`, `too_long` and the metrics.

    Raises:
        ConfigError: a row does not follow the schema, or the chat template has no place for answers.
    """
    schema = check_source(data)
    if schema in EXAMS:
        found = _exams(loaded, _told(read_rows(data, read_exam)), asking)
    else:
        found = _writings(loaded, _told(read_rows(data, _writing(data.system))), asking)
    return {"schema": schema, **found}


def _exams(loaded: Loaded, exams: Iterable[Exam], asking: Asking) -> dict[str, Any]:
    graded: list[Graded] = []
    for some in _batches(exams, asking.batch_size):
        asked = [(exam, documents_of(loaded, _replies(exam))) for exam in some]
        whole = [all(fits(loaded, one) for one in documents) for _, documents in asked]
        flat = [one for (_, documents), fit in zip(asked, whole, strict=True) if fit for one in documents]
        chars = [len(text) for exam, fit in zip(some, whole, strict=True) if fit for text in exam.replies]
        scores = iter(answer_scores(loaded, flat, chars) if flat else ())
        for exam, fit in zip(some, whole, strict=True):
            own = list(islice(scores, len(exam.replies))) if fit else []
            graded.append(grade(own, exam.right) if fit else unanswered(exam.right))
    too_long = sum(item.chosen < 0 for item in graded)
    return {"rows": len(graded), "too_long": too_long, **exam_metrics(graded)}


def _replies(exam: Exam) -> list[list[Message]]:
    question = {"role": "user", "content": exam.question}
    return [[question, {"role": "assistant", "content": reply}] for reply in exam.replies]


def _writing(system: str) -> Any:
    """Reads a conversation up to its last answer."""

    def read(row: dict[str, Any]) -> list[Message]:
        talk = place_system(read_openthoughts(row), system)
        while talk and talk[-1]["role"] != "assistant":
            talk = talk[:-1]
        if len(talk) < 2:
            raise RowError("no assistant turn that answers another one")
        return talk

    return read


def _writings(loaded: Loaded, talks: Iterable[list[Message]], asking: Asking) -> dict[str, Any]:
    pairs: list[tuple[str | None, str]] = []
    scores: list[ReplyScore] = []
    for some in _batches(talks, asking.batch_size):
        asked = list(zip(some, documents_of(loaded, some), strict=True))
        short = [(talk, document) for talk, document in asked if fits(loaded, document)]
        pairs += [(None, talk[-1]["content"]) for talk, document in asked if not fits(loaded, document)]
        if short:
            scores += answer_scores(loaded, [one for _, one in short], [1] * len(short))
        # A row whose answer might reach the end of the model's positions is written alone, with fewer tokens.
        rooms = [room_for(loaded, talk[:-1], asking.max_new_tokens) for talk, _ in short]
        whole = [talk for (talk, _), room in zip(short, rooms, strict=True) if room == asking.max_new_tokens]
        pairs += _written(loaded, whole, asking.max_new_tokens)
        for (talk, _), room in zip(short, rooms, strict=True):
            if room < asking.max_new_tokens:
                pairs += _written(loaded, [talk], room)
    too_long = sum(written is None for written, _ in pairs)
    found = {"rows": len(pairs), "too_long": too_long, **match_metrics(pairs)}
    return {**found, "answer_nll": answer_nll(scores)}


def _written(loaded: Loaded, talks: list[list[Message]], room: int) -> list[tuple[str | None, str]]:
    if not talks:
        return []
    texts = write(loaded, [talk[:-1] for talk in talks], room)
    return [(text, talk[-1]["content"]) for text, talk in zip(texts, talks, strict=True)]


def _batches(items: Iterable[T], size: int) -> Iterator[list[T]]:
    rest = iter(items)
    while some := list(islice(rest, size)):
        yield some


def _told(rows: Iterable[T]) -> Iterator[T]:
    """The rows, and a line for a person every few seconds."""
    told = time.monotonic()
    for number, row in enumerate(rows):
        if time.monotonic() - told >= _PROGRESS_S:
            told = time.monotonic()
            print(f"{number} rows done", file=sys.stderr, flush=True)
        yield row


def describe(result: dict[str, Any]) -> str:
    """One line for a person."""
    if "accuracy" in result:
        main = f"accuracy {result['accuracy']:.4f} +- {result['stderr']:.4f}"
        main += f", by length {result['accuracy_norm']:.4f}"
    else:
        main = f"exact match {result['exact_match']:.4f} +- {result['stderr']:.4f}"
    notes = f", {result['too_long']} too long (counted as wrong)" if result["too_long"] else ""
    notes += f", {result['ties']} ties" if result.get("ties") else ""
    return (
        f"{result['model']} on {result['data']} ({result['schema']}, {result['rows']} rows): {main}, "
        f"{result['answer_nll']:.4f} nats per answer token{notes}"
    )


if __name__ == "__main__":
    sys.exit(main())
