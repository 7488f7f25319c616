"""What ranks tell each other with the drift: each slot arrives as it was said, from whichever rank."""

from math import inf, nan

import pytest

from layercheck.drift_report import DriftReport
from layercheck.tracking.notices import NoticeSlots, RankNotices


def heard(*said: RankNotices) -> DriftReport:
    """What all ranks hear when each says one thing."""
    ranks = [NoticeSlots(rank, len(said), ["a"]) for rank in range(len(said))]
    slots = [each.encode(notices, 1e-3) for each, notices in zip(ranks, said, strict=True)]
    return ranks[0].decode(5, {"a": 0.0}, None, [sum(column) for column in zip(*slots, strict=True)])


@pytest.mark.parametrize("norm", [inf, nan])
@pytest.mark.parametrize("rank", [0, 1])
def test_i13_a_norm_that_is_not_finite_is_an_error_of_its_rank(norm: float, rank: int) -> None:
    said = [RankNotices(grad_norm=norm if other == rank else 1.0) for other in (0, 1)]
    assert heard(*said).errors == 1
    assert heard(RankNotices(grad_norm=1.0), RankNotices(grad_norm=1.0)).errors == 0


def test_the_shortest_grace_and_the_longest_backlog_of_all_ranks_count() -> None:
    report = heard(
        RankNotices(backlog=3, grace_s=0), RankNotices(backlog=7, grace_s=40), RankNotices(grace_s=30)
    )
    assert (report.backlog, report.grace_s) == (7, 30)
    assert heard(RankNotices(), RankNotices()).grace_s == 0


def test_what_any_rank_left_out_of_memory_is_counted_and_is_no_error() -> None:
    report = heard(RankNotices(left_out=1, stall_s=4.0), RankNotices(), RankNotices(left_out=2))
    assert (report.left_out, report.errors, report.stall_s) == (3, 0, pytest.approx(4 / 3))


def test_what_rank_0_alone_knows_is_heard_from_no_other() -> None:
    report = heard(
        RankNotices(committed_step=4, lost_steps=(3,)),
        RankNotices(committed_step=9, lost_steps=(8,), fenced=True),
    )
    assert (report.committed_step, report.lost_steps, report.fenced) == (4, (3,), False)
