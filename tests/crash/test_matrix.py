"""The crash matrix: a sample in every run, all of it where there is time."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.crash.disk import Disk
from tests.crash.lives import RUN, World
from tests.crash.matrix import MEDIA, Sample, record, run_matrix, story

FEW = {medium: Sample(41, 97, 67, 31) for medium in MEDIA} | {"object store": Sample(11, 13, 31, 7)}
"""Prime, so that the sample does not fall into step with the protocol."""


@pytest.mark.parametrize("medium", MEDIA)
def test_i2_i5_i7_i12_a_sample_of_all_crashes_costs_nothing_that_was_committed(medium: str) -> None:
    tally = run_matrix([medium], FEW[medium])
    assert tally.failures == []
    assert tally.correct == tally.cases > 40


def test_the_recorded_run_makes_every_kind_of_change_on_every_process() -> None:
    """What is never written cannot be crashed in: the matrix covers no file that this list lacks."""
    world = World(Disk())
    record(world, story)
    found = Counter((event.owner, event.call, _kind(event.path)) for event in world.medium.watch.seen)
    for kind in ("claim", "progress", "receipt", "commit", "history", "blacklist", "run.json"):
        assert found["coordinator", "link" if kind in ("claim", "run.json") else "rename", kind], kind
    for rank in ("rank 0", "rank 1"):
        assert found[rank, "rename", "shard"] >= 10
    assert found["rank 0", "rename", "metrics"]
    assert found["coordinator", "unlink", "commit"] >= 3
    assert found["coordinator", "unlink", "shard"] >= 6
    assert found["coordinator", "rmdir", "event"] >= 3
    temp = Counter(event.call for event in world.medium.watch.seen if ".tmp-" in event.path)
    assert {"create", "write", "fsync", "unlink"} <= temp.keys()
    assert found["coordinator", "fsync folder", "event"]


def _kind(path: str) -> str:
    name = path.removeprefix(f"{RUN}/").removeprefix("layercheck/")
    last = name.split("/")[-1]
    if name.startswith("events/"):
        return {"commit.parquet": "commit"}.get(last, "shard" if "rank-" in last else "event")
    if name.startswith("attempts/"):
        return next((kind for kind in ("progress", "receipt") if kind in last), "claim")
    return name.split("/")[0]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_whole_matrix_by_its_command(tmp_path: Path) -> None:
    file = tmp_path / "matrix.json"
    command = [sys.executable, "-m", "tests.crash.matrix", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    result = json.loads(file.read_text())
    assert set(result) == {"cases", "correct", "failures"}
    assert result["failures"] == []
    assert result["correct"] == result["cases"] > 3000
