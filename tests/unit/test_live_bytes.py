"""What a run keeps in its store over thousands of steps: the real policy, the real collection, no bytes."""

import random
from dataclasses import dataclass, field

import pytest

from layercheck.config import LayerCheckConfig
from layercheck.coordination.collect import collect
from layercheck.coordination.facts import StoreFacts
from layercheck.decision import PersistDecision
from layercheck.layers import LayerMap
from layercheck.manifest import AttemptRecord, Commit, EventId, LineageLink, RunRecord, ShardRecord
from tests.unit.simulated_run import SimulatedRun, config, transformer

SLACK = 0.3


@dataclass
class Shelf:
    """The commits that collection has left so far; one element counts as one byte."""

    layer_map: LayerMap
    settings: LayerCheckConfig
    commits: dict[EventId, Commit] = field(default_factory=dict)
    live: list[tuple[int, float]] = field(default_factory=list)
    """Step and live bytes after each event, in full states."""

    def take(self, decision: PersistDecision) -> None:
        if not decision.writes:
            return
        event = EventId(step=decision.step, attempt=1)
        self.commits[event] = self._commit(event, decision)
        facts = StoreFacts(self.run, {1: self.attempt}, 1, tuple(self.commits.values()))
        done = collect(facts, list(self.commits), self.settings.keep_versions, self.settings.keep_full)
        for verdict in done.delete:
            del self.commits[verdict.event]
        total = sum(layer.numel for layer in self.layer_map.layers)
        live = sum(row.nbytes for commit in self.commits.values() for row in commit.records)
        self.live.append((event.step, live / total))

    def _commit(self, event: EventId, decision: PersistDecision) -> Commit:
        rows = tuple(
            ShardRecord(
                layer=write.layer, step=event.step, attempt=1, rank=0, world_size=1, file=event.shard_file(0),
                begin=0, end=self.layer_map.by_name[write.layer].numel, xxh3_128="", drift=write.drift,
                threshold=write.threshold, age=write.age, reason=write.reason, snapshot_s=0.0, write_s=0.0,
            )
            for write in decision.writes
        )  # fmt: skip
        return Commit(event=event, records=rows, trainer_state={"step": event.step}, lineage=self.lineage)

    @property
    def lineage(self) -> tuple[LineageLink, ...]:
        return (LineageLink(attempt=1, r_b=0, predecessor=0, saw_step=-1),)

    @property
    def run(self) -> RunRecord:
        return RunRecord(run_id="id", name="r", layer_map=self.layer_map, optimizer="AdamW")

    @property
    def attempt(self) -> AttemptRecord:
        return AttemptRecord(
            attempt=1, token="t", submission="s", world_size=1, mode="composite", r_b=0,
            trainer_state={"step": 0}, lineage=self.lineage,
        )  # fmt: skip


def live_states(blocks: int, spread: float, steps: int = 1900, **settings: object) -> list[tuple[int, float]]:
    """Step and live full states after each event of a run; rates of drift from 1 to `spread`."""
    layers = transformer(blocks, embedding_numel=3000)
    chance = random.Random(blocks)
    rate = {layer.name: 1 + (spread - 1) * i / len(layers.layers) for i, layer in enumerate(layers.layers)}
    chosen = config(**settings)
    run = SimulatedRun(
        layers, chosen, lambda step, name: 1e-6 * rate[name] * chance.uniform(0.7, 1.3), delay=lambda step: 2
    ).run(0, steps)
    shelf = Shelf(layers, chosen)
    for decision in run.decisions:
        shelf.take(decision)
    return shelf.live


def steady(live: list[tuple[int, float]]) -> list[float]:
    """From two age limits after the base on: until then a full event is held by the slowest layer alone."""
    return [states for step, states in live if step > 200 + 2 * 400]


@pytest.mark.parametrize(("blocks", "spread"), [(6, 1), (6, 3), (28, 1), (28, 3)])
def test_i5_live_bytes_in_steady_state_stay_below_what_the_settings_promise(
    blocks: int, spread: float
) -> None:
    live = steady(live_states(blocks, spread))
    assert len(live) > 50
    assert max(live) <= 2 + 1 + SLACK
    assert min(live) >= 2, "two versions of everything are kept"


def test_i5_an_event_stays_whole_while_one_of_its_layers_is_needed_and_that_costs_little() -> None:
    """Nine times as fast beside slow: the promise holds on average, single moments pass it."""
    live = steady(live_states(28, 9))
    assert sum(live) / len(live) <= 2 + 1 + SLACK
    assert max(live) <= 2 + 1 + 2 * SLACK


def test_i5_after_the_base_two_full_events_and_two_versions_of_each_layer_are_the_most() -> None:
    assert max(states for _, states in live_states(28, 9)) <= 2 + 2


@pytest.mark.parametrize(("keep_versions", "keep_full"), [(1, 1), (3, 2)])
def test_i5_the_promise_follows_the_settings(keep_versions: int, keep_full: int) -> None:
    live = steady(live_states(28, 1, keep_versions=keep_versions, keep_full=keep_full))
    assert max(live) <= keep_versions + keep_full + SLACK
