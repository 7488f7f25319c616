"""Ranks, deaths, coordinators that restart, zombies and takeovers, in any order."""

import shutil
import tempfile

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from xxhash import xxh3_128_hexdigest

from layercheck.coordination import journal
from layercheck.coordination.coordinator import Coordinator
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.manifest import RecoveryPlan
from layercheck.persistence.storage import LocalStorage
from tests.fakes import Clock
from tests.runs import LAYERS, WARMUP, Group, config, coordinator, run_record

WORLD = 2


class Lives(RuleBasedStateMachine):
    """`acknowledged`: the newest version of each layer that a living group was told is committed.

    No later plan of the same history may be older. `begun`: attempt -> its r_b and the commits it found.
    """

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp()
        self.clock = Clock()
        self.storage = LocalStorage(self.folder)
        self.zombies: list[Group] = []
        self.pending: list[tuple[Group, int, int, tuple[str, ...]]] = []
        self.step = 0
        self.tokens = 0
        self.acknowledged: dict[str, tuple[int, int]] = {}
        self.begun: dict[int, tuple[int, set[str]]] = {}

    def teardown(self) -> None:
        shutil.rmtree(self.folder)

    @initialize()
    def first_attempt(self) -> None:
        made = coordinator(self.storage, self.clock)
        self.storage.write("probe", [b"x"])
        made.open_run(run_record(), "probe")
        self.group = Group(made, self.storage, made.begin_attempt(self.token(), "s0", WORLD, "composite"))
        for step in (0, 2, WARMUP):
            self.group.save(step)
        self.step = WARMUP
        self.group.train(self.step)
        self.learn()

    def token(self) -> str:
        self.tokens += 1
        return f"t{self.tokens}"

    def learn(self) -> None:
        """The group hears what is committed; from now on these versions count on being found."""
        reply = self.group.beat(self.step)
        assert not reply.fenced, "the newest attempt was told that it is fenced"
        for commit in journal.load_commits(self.storage)[0]:
            event = commit.event
            if event.attempt == self.group.attempt and event.step <= reply.committed_step:
                for layer in commit.by_layer:
                    newest = self.acknowledged.get(layer, (-1, 0))
                    self.acknowledged[layer] = max(newest, (event.step, event.attempt))

    # ---------------------------------------------------------------- what can happen

    @rule(count=st.integers(1, 3), second=st.floats(0.1, 2))
    def train(self, count: int, second: float) -> None:
        for _ in range(count):
            self.step += 1
            self.clock.now += second
            self.learn()

    @rule(layers=st.sets(st.sampled_from(LAYERS), min_size=1))
    def save(self, layers: set[str]) -> None:
        self.step += 1
        self.group.save(self.step, *sorted(layers))
        self.learn()

    @rule(layers=st.sets(st.sampled_from(LAYERS), min_size=1), rank=st.integers(0, WORLD - 1))
    def save_on_one_rank_only(self, layers: set[str], rank: int) -> None:
        self.step += 1
        chosen = tuple(sorted(layers))
        self.group.record(self.step, rank, chosen)
        self.pending.append((self.group, self.step, 1 - rank, chosen))
        self.learn()

    @precondition(lambda self: self.pending)
    @rule(data=st.data())
    def a_late_record_comes(self, data: st.DataObject) -> None:
        group, step, rank, layers = self.pending.pop(data.draw(st.integers(0, len(self.pending) - 1)))
        event, rows = group.write(step, rank, layers)
        group.coordinator.record(event, rank, rows, group.state(step))

    @rule()
    def the_clock_passes_the_timeout(self) -> None:
        self.clock.now += 11
        self.learn()

    @rule()
    def the_coordinator_is_built_anew(self) -> None:
        self.group.coordinator = coordinator(self.storage, self.clock)

    @rule(same=st.booleans(), mode=st.sampled_from(["composite", "uniform"]))
    def the_workers_die_and_begin_again(self, same: bool, mode: str) -> None:
        """By the same coordinator, or by another one while the old group goes on as a zombie."""
        made = self.group.coordinator if same else coordinator(self.storage, self.clock)
        self.succeed(made, "s0", mode)

    @rule()
    def another_submission_takes_over(self) -> None:
        made = Coordinator(self.storage, config(), self.clock, self.clock.sleep)
        self.succeed(made, f"s{self.tokens}", "composite")

    def succeed(self, made: Coordinator, submission: str, mode: str) -> None:
        token = self.token()
        grant = made.begin_attempt(token, submission, WORLD, mode)
        assert grant.plan is not None
        again = coordinator(self.storage, self.clock).begin_attempt(token, submission, WORLD, mode)
        assert (again.attempt, again.r_b) == (grant.attempt, grant.r_b)  # I8
        assert again.plan is not None
        assert again.plan.layers == grant.plan.layers
        self.begun[grant.attempt] = (grant.r_b, set(self.commits()))
        self.check_complete(grant.plan)
        if mode == "composite":
            self.check_newest(grant.plan)
        else:
            self.acknowledged = {layer.layer: (layer.step, layer.attempt) for layer in grant.plan.layers}
        self.zombies = [*self.zombies, self.group][-2:]
        self.group = Group(made, self.storage, grant)
        self.step = grant.plan.resume_step - 1

    @precondition(lambda self: self.zombies)
    @rule(data=st.data())
    def a_zombie_goes_on(self, data: st.DataObject) -> None:
        zombie = data.draw(st.sampled_from(self.zombies))
        commits = self.commits()
        step = self.step + data.draw(st.integers(1, 3))
        zombie.save(step)
        zombie.beat(step)
        zombie.coordinator.close()
        assert self.commits() == commits, "a fenced attempt committed or deleted"  # I8

    def commits(self) -> list[str]:
        return [commit.event.folder for commit in journal.load_commits(self.storage)[0]]

    # ---------------------------------------------------------------- what must hold

    @invariant()
    def a_rebuilt_reader_finds_a_whole_plan(self) -> None:
        """I2, I5, I12, I15 from storage alone, as after a crash at this very moment."""
        facts = journal.load_facts(self.storage)
        if not facts.commits:
            return
        plan = make_plan(facts, PlanRequest(WORLD))
        assert plan is not None
        self.check_complete(plan)
        self.check_newest(plan)

    def check_complete(self, plan: RecoveryPlan) -> None:
        """Every byte that the plan names is there and right; no layer comes from a dead branch."""
        for layer in plan.layers:
            assert [shard.rank for shard in layer.shards] == list(range(WORLD))
            for attempt, (r_b, found) in self.begun.items():
                if attempt > layer.attempt:
                    assert layer.step <= r_b, "undone by a roll-back"
                    assert layer.shards[0].event.folder in found, "committed behind its successor's back"
            for shard in layer.shards:
                data = self.storage.read(shard.file, shard.begin, shard.end)
                assert xxh3_128_hexdigest(data) == shard.xxh3_128

    def check_newest(self, plan: RecoveryPlan) -> None:
        """Never older than what a living group was told is safe."""
        for layer in plan.layers:
            assert (layer.step, layer.attempt) >= self.acknowledged[layer.layer]
        assert plan.resume_step == plan.t_fail + 1


Lives.TestCase.settings = settings(
    max_examples=20, stateful_step_count=14, deadline=None, suppress_health_check=list(HealthCheck)
)
TestI2I5I8I12I15OverAnyInterleaving = Lives.TestCase
