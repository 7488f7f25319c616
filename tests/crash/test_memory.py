"""The crash matrix of the memory tier: whatever dies or is damaged, bytes are right and as new as can be."""

import itertools
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.coordination import journal
from layercheck.coordination.plan import PlanRequest, make_plan
from tests.crash.memory_world import World
from tests.runs import LAYERS

ENDS = ("kill workers", "kill vault", "kill coordinator", "zombies", "lose node")
SOME = st.sets(st.sampled_from(LAYERS), min_size=1).map(lambda names: tuple(sorted(names)))
MOVES = st.lists(
    st.one_of(
        st.tuples(st.just("memory"), SOME),
        st.tuples(st.just("storage"), SOME),
        st.tuples(st.just("one rank"), SOME),
        st.tuples(st.just("tear"), SOME),
        st.tuples(st.sampled_from(ENDS)),
        st.tuples(st.just("damage"), st.integers(0, 10**6)),
    ),
    max_size=14,
)


def play(world: World, move: str, *args: object) -> None:
    """One move; a move that ends the worker group is followed by a recovery."""
    world.step += move in ("memory", "storage", "one rank", "tear")
    if move in ("memory", "storage"):
        world.save(args[0], in_memory=move == "memory")  # type: ignore[arg-type]
    elif move == "one rank":  # the other one is killed before it has sealed: the group dies
        world.save(args[0], in_memory=True, ranks=1)  # type: ignore[arg-type]
        world.recover()
    elif move == "tear":
        world.tear(1, args[0])  # type: ignore[arg-type]
        world.recover()
    elif move == "kill workers":
        world.recover()
    elif move == "kill vault":
        world.kill_vault(world.step % 2)
    elif move == "kill coordinator":
        world.kill_coordinator()
    elif move == "zombies":
        old, attempt, step = list(world.sinks), world.attempt, world.step + 1
        world.recover()
        world.zombies_seal(old, attempt, step)
    elif move == "lose node":
        world.lose_node(world.step % 2)
        world.recover()
    elif move == "damage":
        world.damage(args[0])  # type: ignore[arg-type]


@settings(max_examples=25, deadline=None)
@given(moves=MOVES)
def test_any_order_of_deaths_recovers_what_was_sealed_and_leaves_nothing(
    moves: list[tuple[object, ...]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    world = World(tmp_path_factory.mktemp("world"))
    for move in moves:
        play(world, *move)  # type: ignore[arg-type]
    world.recover()
    plan = make_plan(journal.load_facts(world.storage), PlanRequest())
    assert plan is not None
    world.end()


DEATHS: dict[str, Callable[[World], None]] = {
    "workers": lambda world: None,
    "vaults": lambda world: [world.kill_vault(node) for node in (0, 1)] and None,
    "coordinator": lambda world: world.kill_coordinator(),
    "a torn segment": lambda world: _tear(world),
}


def _tear(world: World) -> None:
    """The first rank dies in the step after; nobody has heard of that one."""
    world.step += 1
    world.tear(0, LAYERS)
    world.step -= 1


@pytest.mark.parametrize(("first", "second"), list(itertools.permutations(DEATHS, 2)))
def test_i10_two_deaths_in_a_row_with_memory_at_every_step_cost_no_step(
    first: str, second: str, tmp_path: Path
) -> None:
    world = World(tmp_path)
    for death in (first, second):
        for _ in range(3):
            world.step += 1
            world.save(LAYERS, in_memory=True)
        DEATHS[death](world)
        plan = world.recover()
        assert plan is not None
        assert (plan.max_age, plan.t_fail) == (0, world.step)
    assert world.step == 4 + 6
    world.end()


@pytest.mark.slow
def test_two_hundred_killed_groups_leave_no_segment_behind(tmp_path: Path) -> None:
    world = World(tmp_path)
    for number in range(200):
        world.step += 1
        world.save(LAYERS, in_memory=number % 5 > 0)
        if number % 7 == 0:
            world.kill_vault(number % 2)
        world.recover()
        assert sum(len(vault.files) for vault in world.vaults) <= 2 * 3, "what the plan came from"
    world.end()


def test_memory_that_is_full_costs_freshness_alone(tmp_path: Path) -> None:
    world = World(tmp_path, budget=6_000)
    for _ in range(4):
        world.step += 1
        world.save(LAYERS, in_memory=True)
        world.step += 1
        world.save(LAYERS, in_memory=False)
    for vault in world.vaults:
        assert vault.used_bytes <= world.budget
    assert world.recover() is not None
    world.end()
