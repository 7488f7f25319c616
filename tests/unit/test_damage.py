"""I6 and I9: what is damaged costs a version; a storage that does not answer for a while costs nothing."""

import errno
from pathlib import Path

import pytest

from layercheck.coordination import journal
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.errors import StorageError
from layercheck.manifest import BadShard
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery.fetch import FetchedLayer, Fetcher
from tests.crash.lives import Wanted
from tests.fakes import Clock
from tests.runs import LAYERS, layer_map
from tests.stores import RealRun, real_run


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return real_run(tmp_path / "r1")


class SickStorage(LocalStorage):
    """Reads of paths that hold `matching` fail `times` times."""

    def __init__(self, root: Path, matching: str, code: int, times: int = 1 << 30) -> None:
        super().__init__(str(root))
        self.matching, self.code, self.times = matching, code, times

    def _sick(self, path: str) -> None:
        if self.matching in path and self.times > 0:
            self.times -= 1
            raise StorageError(f"injected: read {path}", path=path, errno=self.code)

    def read(self, path: str, begin: int = 0, end: int | None = None) -> bytes:
        self._sick(path)
        return super().read(path, begin, end)

    def read_into(self, path: str, begin: int, *into: memoryview) -> None:
        self._sick(path)
        super().read_into(path, begin, *into)


def fetched(storage: LocalStorage, clock: Clock) -> tuple[dict[str, FetchedLayer], list[str]]:
    plan = make_plan(journal.load_facts(storage), PlanRequest(2))
    assert plan is not None
    wanted = {
        spec.name: [Wanted(param, 0, param.numel) for param in spec.params] for spec in layer_map().layers
    }
    fetcher = Fetcher(storage, sleep=clock.sleep)
    found = [fetcher.fetch(version, wanted[version.layer]) for version in plan.layers]
    layers = {one.layer: one for one in found if isinstance(one, FetchedLayer)}
    return layers, [one.layer for one in found if isinstance(one, BadShard)]


def test_i6_a_bad_sector_under_a_shard_costs_its_layer_an_older_version(run: RealRun) -> None:
    clock = Clock()
    layers, bad = fetched(SickStorage(run.folder, "step-00000012.a001/rank-", errno.EIO), clock)
    assert bad == ["layers.0"]
    assert set(layers) == {"embed_tokens", "norm"}
    assert clock.now == Clock().now, "damage is not waited for"


def test_i9_a_storage_that_refuses_for_a_while_is_asked_again_and_no_version_is_given_up(
    run: RealRun,
) -> None:
    clock = Clock()
    layers, bad = fetched(SickStorage(run.folder, "rank-", errno.ESTALE, times=5), clock)
    assert bad == []
    assert set(layers) == set(LAYERS)
    assert 1 < clock.now - Clock().now < 60


def test_i9_a_storage_that_goes_on_refusing_ends_the_attempt_and_gives_no_version_up(run: RealRun) -> None:
    clock = Clock()
    with pytest.raises(StorageError, match="injected"):
        fetched(SickStorage(run.folder, "rank-", errno.EACCES), clock)
    assert clock.now - Clock().now < 120
    assert run.storage.list("blacklist") == []


@pytest.mark.parametrize(
    ("path", "lost"),
    [
        ("step-00000012.a001/commit", "events/step-00000012.a001/commit.parquet"),
        ("a001.progress", "attempts/a001.progress.json"),
        ("a001.json", "attempts/a001.json"),
    ],
)
def test_i6_a_record_on_a_bad_sector_counts_as_absent_and_is_announced(
    run: RealRun, path: str, lost: str
) -> None:
    facts = journal.load_facts(SickStorage(run.folder, path, errno.EIO))
    assert [note for note in facts.notes if note.startswith(f"{lost} counts as absent")]
    plan = make_plan(facts, PlanRequest(2))
    assert plan is not None
    assert max(layer.step for layer in plan.layers) == (10 if "commit" in path else 12)


@pytest.mark.parametrize("path", ["commit.parquet", "a001.progress", "a001.json", "run.json"])
def test_i7_records_that_the_storage_refuses_are_not_taken_for_absent(run: RealRun, path: str) -> None:
    with pytest.raises(StorageError, match="injected"):
        journal.load_facts(SickStorage(run.folder, path, errno.EACCES))


def test_i7_all_commits_on_bad_sectors_are_no_fresh_run(run: RealRun) -> None:
    from layercheck.errors import NoPlanError

    facts = journal.load_facts(SickStorage(run.folder, "commit.parquet", errno.EIO))
    with pytest.raises(NoPlanError, match="embed_tokens"):
        make_plan(facts, PlanRequest(2))


@pytest.mark.parametrize(
    "name",
    [
        "events/step-00000003.a000/x",
        "events/step-000000012.a001/x",
        "events/step-00000012.a0001/x",
        "events/step-00000003.a001",
        "events/lost+found/x",
        "attempts/a007.json/x",
        "attempts/a001.receipt.json/x",
        "blacklist/shard-x.json/x",
        "blacklist/notes.txt",
        "history/x",
    ],
)
def test_strange_names_in_a_store_end_no_recovery(run: RealRun, name: str) -> None:
    """A file for a folder, a folder for a file, numbers that no event has: left by people and their tools."""
    path = run.folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"?")
    plan = make_plan(journal.load_facts(run.storage), PlanRequest(2))
    assert plan is not None
    assert {layer.layer: layer.step for layer in plan.layers} == {
        "embed_tokens": 4, "layers.0": 12, "norm": 10
    }  # fmt: skip
    again = RealRun(run.folder.parent, token="t2")
    again.save(15)
    again.save(16)
    assert again.coordinator.heartbeat(again.attempt, 17, {"step": 17}, {}).alerts == ()
