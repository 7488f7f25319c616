"""Two submissions that start at the same moment where no name can be created exclusively."""

from dataclasses import dataclass

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from layercheck.coordination import journal
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.errors import RunIsLiveError
from tests.crash.bucket import Bucket
from tests.crash.race import Race
from tests.runs import Group, config, run_record

LOW, HIGH = "0" * 31 + "1", "f" * 32
STEPS = 4
QUICK, SLOW = (0.0, 0.01, 0.05, 0.1, 0.15, 0.2), (0.3, 0.45, 0.6, 1.1, 2.5)
CALLS = st.lists(st.sampled_from(QUICK * 2 + SLOW), max_size=40).map(lambda calls: [*calls, 0.05])
"""Seconds of one call after the other: mostly quick, sometimes too slow for a claim to count."""
STARTS = st.floats(0.0, 3.0)


@dataclass
class Submission:
    """One that opens the run, claims an attempt and trains until it is fenced off or done."""

    name: str
    token: str
    race: Race
    bucket: Bucket
    takeover: bool
    attempt: int = 0
    fenced: bool = False
    refused: bool = False
    done: int = -1
    granted_at: float = 0.0
    ended_at: float = 0.0

    def __call__(self) -> None:
        storage = self.bucket.storage("bucket/r1/layercheck", self.name)
        timer = self.race.timer(self.name)
        coordinator = Coordinator(storage, config(), timer.clock, timer.sleep)
        storage.write(f"probe-{self.name}", [b"x"])
        coordinator.open_run(run_record(), f"probe-{self.name}")
        try:
            grant = coordinator.begin_attempt(self.token, self.name, 2, "composite", self.takeover)
        except RunIsLiveError:
            self.refused = True
            return
        self.attempt, self.granted_at = grant.attempt, self.race.now
        group = Group(coordinator, storage, grant)  # type: ignore[arg-type]
        for step in range(grant.r_b, STEPS + 1):
            group.save(step)
            if group.beat(step).fenced:
                self.fenced = True
                return
            self.done = step
            timer.sleep(1.0)
        coordinator.close()
        self.ended_at = self.race.now


def race(
    starts: tuple[float, float], delays: tuple[list[float], list[float]], takeover: bool
) -> tuple[list[Submission], Bucket]:
    racing = Race({"first": delays[0], "second": delays[1]})
    bucket = Bucket()
    bucket.watch.on_call = racing.on_call
    both = [
        Submission("first", HIGH, racing, bucket, takeover),
        Submission("second", LOW, racing, bucket, takeover),
    ]
    racing.run({one.name: (start, one) for one, start in zip(both, starts, strict=True)})
    assert racing.errors == {}
    bucket.watch.on_call = None
    return both, bucket


def check_one_lineage(both: list[Submission], bucket: Bucket) -> None:
    """The newest attempt got to its end; the other one was refused, fenced, or had ended before it began."""
    facts = journal.load_facts(bucket.storage("bucket/r1/layercheck", "reader"))
    assert facts.newest is not None
    (survivor,) = [one for one in both if one.name == facts.newest.submission]
    (other,) = [one for one in both if one is not survivor]
    assert not survivor.fenced
    assert not survivor.refused
    assert facts.newest.attempt == survivor.attempt
    assert other.attempt != survivor.attempt, "two were granted one number"
    assert other.fenced or other.refused or other.ended_at <= survivor.granted_at
    plan = make_plan(facts, PlanRequest(2))
    assert plan is not None
    assert plan.t_fail == survivor.done == STEPS
    assert {layer.step for layer in plan.layers} == {STEPS}
    for commit in facts.live_commits(facts.lineage):
        assert commit.lineage == facts.newest.lineage[: len(commit.lineage)]


EXAMPLES = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@EXAMPLES
@given(st.tuples(STARTS, STARTS), st.tuples(CALLS, CALLS))
def test_i15_of_two_submissions_that_both_insist_one_survives(
    starts: tuple[float, float], delays: tuple[list[float], list[float]]
) -> None:
    check_one_lineage(*race(starts, delays, takeover=True))


@EXAMPLES
@example((1.0, 0.0), ([0.05], [0.0, 0.0, 0.0, 1.1, 2.5, 0.05]))  # begun between two looks at the store
@given(st.tuples(STARTS, STARTS), st.tuples(CALLS, CALLS))
def test_i15_of_two_submissions_that_do_not_insist_one_is_refused_or_fenced(
    starts: tuple[float, float], delays: tuple[list[float], list[float]]
) -> None:
    check_one_lineage(*race(starts, delays, takeover=False))


@pytest.mark.parametrize("ahead", [0.0, 0.01, 0.05, 0.1, 0.2, 0.3, 0.45, 0.6, 1.0, 1.5, 2.5])
def test_i15_whatever_the_head_start_one_lineage_survives(ahead: float) -> None:
    for starts in ((0.0, ahead), (ahead, 0.0)):
        check_one_lineage(*race(starts, ([0.05], [0.05]), takeover=True))


def test_i9_a_storage_too_slow_for_any_claim_is_one_error_that_says_so() -> None:
    racing = Race({"first": [0.4]})
    bucket = Bucket()
    bucket.watch.on_call = racing.on_call
    racing.run({"first": (0.0, Submission("first", HIGH, racing, bucket, takeover=True))})
    assert "a listing and a PUT take over half a second" in str(racing.errors["first"])


def test_a_claim_of_a_dead_process_that_lands_late_does_not_end_the_living_attempt() -> None:
    """Its PUT was on the way when it died. Its token is the lower one, and nobody will ever withdraw it."""
    bucket = Bucket()
    racing = Race({"first": [0.01]})
    only = Submission("first", HIGH, racing, bucket, takeover=True)
    landed = []

    def on_call(name: str) -> None:
        racing.on_call(name)
        mine = f"bucket/r1/layercheck/attempts/a001.{HIGH}.json"
        if racing.now > 1.5 and not landed and mine in bucket.objects:
            landed.append(racing.now)
            bucket.objects[mine.replace(HIGH, LOW)] = bucket.objects[mine].replace(b'"first"', b'"ghost"')

    bucket.watch.on_call = on_call
    racing.run({"first": (0.0, only)})
    assert racing.errors == {}
    assert landed
    assert not only.fenced
    assert only.done == STEPS
    bucket.watch.on_call = None
    record = journal.read_attempt(bucket.storage("bucket/r1/layercheck", "reader"), 1)
    assert record is not None
    assert record.token == HIGH
