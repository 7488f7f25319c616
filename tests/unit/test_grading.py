import math

import pytest

from app.grading import ReplyScore, answer_nll, exam_metrics, final_answer, grade, match_metrics, unanswered


def _scores(*pairs: tuple[float, int]) -> list[ReplyScore]:
    return [ReplyScore(logprob, 2, chars) for logprob, chars in pairs]


def test_the_largest_sum_wins_and_by_length_another_reply_may() -> None:
    graded = grade(_scores((-8.0, 4), (-6.0, 2), (-9.0, 12)), right=2)
    assert (graded.chosen, graded.chosen_norm, graded.tied) == (1, 2, False)
    assert graded.right_score.logprob == -9.0


def test_of_equal_replies_the_first_counts_and_the_tie_is_told() -> None:
    graded = grade(_scores((-6.0, 2), (-5.0, 2), (-5.0, 2)), right=2)
    assert (graded.chosen, graded.tied) == (1, True)
    assert not grade(_scores((-5.0, 2), (-6.0, 2), (-6.0, 2)), right=0).tied, "only a tie for the first place"


def test_metrics_of_an_exam_count_what_could_not_be_asked_as_wrong() -> None:
    right, wrong = grade(_scores((-1.0, 3), (-4.0, 3)), 0), grade(_scores((-1.0, 3), (-4.0, 3)), 1)
    metrics = exam_metrics([right, right, wrong, unanswered(0)])
    assert metrics["accuracy"] == metrics["accuracy_norm"] == 0.5
    assert metrics["stderr"] == pytest.approx(math.sqrt(0.25 / 3))
    assert metrics["answer_nll"] == pytest.approx((1 + 1 + 4) / 6), "over the tokens that were computed"


def test_a_token_counts_once_in_the_mean_however_long_its_answer_is() -> None:
    assert answer_nll([ReplyScore(-3.0, 3, 1), ReplyScore(-5.0, 1, 1)]) == 2.0
    assert math.isnan(answer_nll([]))


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("  two\n words ", "two words"),
        ("<think>no \\boxed{9}</think> It is 7", "It is 7"),
        (
            "<|begin_of_thought|>\\boxed{1}<|end_of_thought|><|begin_of_solution|>\\boxed{2}<|end_of_solution|>",
            "2",
        ),
        ("<|begin_of_solution|> cut", "cut"),
        ("first \\boxed{1}, then \\boxed{\\frac{3}{4}}.", "\\frac{3}{4}"),
        ("never closed \\boxed{3", "never closed \\boxed{3"),
    ],
)
def test_the_final_answer_of_a_text(text: str, answer: str) -> None:
    assert final_answer(text) == answer


def test_an_answer_that_was_not_written_matches_nothing() -> None:
    metrics = match_metrics([("so \\boxed{4}", "\\boxed{4}"), ("5", "4"), (None, ""), ("", "")])
    assert metrics["exact_match"] == 0.5
