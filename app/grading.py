"""Marks of an exam and of written answers: which reply wins, what counts as the same answer."""

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

_SOLUTION = re.compile(r"<\|begin_of_solution\|>(.*?)(?:<\|end_of_solution\|>|$)", re.DOTALL)
_BOX = "\\boxed{"


@dataclass(frozen=True, slots=True)
class ReplyScore:
    """One reply under the model. `logprob` is the sum over its tokens in nats."""

    logprob: float
    num_tokens: int
    num_chars: int


@dataclass(frozen=True, slots=True)
class Graded:
    """One question: the replies chosen by sum and by sum per character, and the right one, as indices.

    `chosen` is -1 where the model could not be asked.
    """

    chosen: int
    chosen_norm: int
    right: int
    tied: bool
    right_score: ReplyScore


def grade(scores: Sequence[ReplyScore], right: int) -> Graded:
    """The reply with the largest score; of equal ones the first, as lm-eval does, and `tied` says so."""
    sums = [score.logprob for score in scores]
    per_char = [score.logprob / max(1, score.num_chars) for score in scores]
    best = max(sums)
    return Graded(sums.index(best), per_char.index(max(per_char)), right, sums.count(best) > 1, scores[right])


def unanswered(right: int) -> Graded:
    """A question that the model could not be asked: wrong."""
    return Graded(-1, -1, right, tied=False, right_score=ReplyScore(0.0, 0, 1))


def exam_metrics(graded: Sequence[Graded]) -> dict[str, Any]:
    """Accuracy by likelihood, the same per character, ties, and nats per token of the right replies."""
    hits = [item.chosen == item.right for item in graded]
    return {
        "accuracy": _mean(hits),
        "accuracy_norm": _mean([item.chosen_norm == item.right for item in graded]),
        "stderr": _stderr(hits),
        "ties": sum(item.tied for item in graded),
        "answer_nll": answer_nll(item.right_score for item in graded),
    }


def match_metrics(pairs: Sequence[tuple[str | None, str]]) -> dict[str, Any]:
    """Share of (written, wanted) pairs with the same final answer; None was not written at all."""
    hits = [
        written is not None and final_answer(written) == final_answer(wanted) for written, wanted in pairs
    ]
    return {"exact_match": _mean(hits), "stderr": _stderr(hits)}


def answer_nll(scores: Iterable[ReplyScore]) -> float:
    """Mean negative log-likelihood of a token over all answers, in nats."""
    found = list(scores)
    tokens = sum(score.num_tokens for score in found)
    return -sum(score.logprob for score in found) / tokens if tokens else math.nan


def final_answer(text: str) -> str:
    r"""What is compared: the last `\boxed{...}` of the solution part, else that part, spaces made single.

    The solution part is what OpenThoughts puts between its solution tags or behind `</think>`, else all.
    """
    tagged = _SOLUTION.search(text)
    part = tagged[1] if tagged else text.rsplit("</think>", 1)[-1]
    boxed = _last_box(part)
    return " ".join((part if boxed is None else boxed).split())


def _last_box(text: str) -> str | None:
    begin = text.rfind(_BOX)
    if begin < 0:
        return None
    depth, start = 1, begin + len(_BOX)
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place]
    return None  # cut off


def _mean(hits: Sequence[bool]) -> float:
    return sum(hits) / len(hits)


def _stderr(hits: Sequence[bool]) -> float:
    """Standard error of the mean of a sample."""
    if len(hits) < 2:
        return math.nan
    share = _mean(hits)
    return math.sqrt(share * (1 - share) / (len(hits) - 1))
