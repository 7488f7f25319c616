"""A vault after any order of deaths: the newest sealed copies are there, and in the end nothing is left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layercheck.manifest import EventId
from tests.vaults import LAYERS, NEXT, Node, event, memory_event, rank_of, whole

MOVES = st.lists(
    st.tuples(
        st.sampled_from(["memory", "storage", "torn", "vault dies", "worker dies"]),
        st.sets(st.sampled_from(LAYERS), min_size=1),
    ),
    max_size=25,
)


@settings(max_examples=30, deadline=None)
@given(moves=MOVES)
def test_after_any_deaths_the_newest_sealed_copy_of_each_layer_is_there_and_in_the_end_nothing(
    moves: list[tuple[str, set[str]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    node = Node(tmp_path_factory.mktemp("node"), budget=100_000)
    newest: dict[str, int] = {}
    stored: list[EventId] = []
    for step, (move, chosen) in enumerate(moves, start=1):
        layers = tuple(sorted(chosen))
        if move == "vault dies":
            node.restart()
        elif move == "worker dies":
            node.rank = rank_of(node.vault, node.storage, node.told)
        elif move == "torn":
            node.rank.write(memory_event(step), layers)
        else:
            made = memory_event(step) if move == "memory" else event(step)
            node.rank.stage(made, layers)
            newest |= dict.fromkeys(layers, step)
            stored += [made] if move == "storage" else []
        assert node.vault.used_bytes <= node.budget
    held = node.vault.settle(NEXT, 5.0)
    found = {layer: max(h.event.step for h in held if layer in h.layers) for h in held for layer in h.layers}
    assert found == newest
    for made in stored:
        assert (made, 0) in node.told.recorded
        assert node.storage.size(made.shard_file(0))
    for one in held:
        data = node.vault.read(one.file, 0, one.nbytes)
        assert data == whole(one.event.step, tuple(sorted(one.layers)))
    node.vault.end(None)
    assert node.left == []
