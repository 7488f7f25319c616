"""I6: what `layercheck verify` finds although every checksum of a shard's data is right."""

from pathlib import Path
from typing import Any

import pytest

from layercheck.coordination.audit import audit
from layercheck.coordination.collector import delete_event
from layercheck.coordination.facts import StoreFacts
from layercheck.coordination.journal import load_facts
from layercheck.manifest import EventId
from layercheck.persistence.shard_file import ShardTensor, layout, read_header
from layercheck.persistence.storage import LocalStorage
from tests.stores import RealRun, real_run

EVENT = EventId(step=12, attempt=1)


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return real_run(tmp_path / "r1")


def write_again(run: RealRun, rank: int, about: dict[str, Any], part: dict[str, Any]) -> None:
    """The same data under a header that says something else, with a right digest of its own."""
    path = EVENT.shard_file(rank)
    old, header = run.storage.read(path), read_header(run.storage, path)
    tensors = [
        ShardTensor(t.parameter, t.state, header.slices[t.parameter].layer, t.dtype, t.numel)
        for t in header.tensors
    ]
    slices = [kept.model_copy(update=part) for kept in header.slices.values()]
    placed = layout(tensors, slices, header.about.model_copy(update=about))
    assert placed.total == len(old)
    run.storage.write(path, [placed.header, old[len(placed.header) :]])


@pytest.mark.parametrize("about", [{"step": 11}, {"attempt": 2}, {"part": 1}, {"rank": 0}, {"world_size": 3}])
def test_i6_a_file_of_another_event_or_rank_is_bad(run: RealRun, about: dict[str, int]) -> None:
    write_again(run, 1, about, {})
    (fault,) = audit(run.storage, load_facts(run.storage)).bad
    assert (fault.file, fault.layer) == (EVENT.shard_file(1), "layers.0")
    assert "world" in fault.error


@pytest.mark.parametrize(
    ("part", "said"), [({"offset": 11}, "begins at 11, not at 10"), ({"numel": 9}, "19 of 20")]
)
def test_i6_slices_that_do_not_cover_a_parameter_are_bad(
    run: RealRun, part: dict[str, int], said: str
) -> None:
    write_again(run, 1, {}, part)
    (fault,) = audit(run.storage, load_facts(run.storage)).bad
    assert said in fault.error


def test_an_event_that_a_living_run_collects_meanwhile_is_not_bad(run: RealRun) -> None:
    class Collected(LocalStorage):
        def size(self, path: str) -> int | None:
            if path == EVENT.shard_file(0) and super().size(EVENT.commit_file) is not None:
                delete_event(self, EVENT)
            return super().size(path)

    facts: StoreFacts = load_facts(run.storage)
    whole = audit(run.storage, facts)
    result = audit(Collected(run.storage.root), facts)
    assert result.bad == ()
    assert result.checked == whole.checked - 2
