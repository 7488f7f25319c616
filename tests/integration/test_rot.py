"""A byte that rots under a running training: found, announced, and the layer is saved anew on all ranks."""

import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from tests.fakes import flip_bit
from tests.harness import run_ranks
from tests.integration.ranks import train

ROTS_AT, STEPS = 10, 16
SETTINGS = {
    "warmup_steps": 4,
    "warmup_full_every": 4,
    "k0": 1e9,  # nothing is ever due by its drift
    "s_max": 400,
    "scrub_hours": 1 / 3600,
}


def _rows(storage: str) -> list[dict[str, Any]]:
    commits = sorted(Path(storage, "run/layercheck/events").glob("*/commit.parquet"))
    return [row for commit in commits for row in pq.read_table(commit).to_pylist()]


def _train_while_it_rots(storage: str) -> dict[str, Any]:
    import torch.distributed as dist

    def each_step(session: Any, step: int) -> None:
        if step != ROTS_AT or dist.get_rank() != 0:
            return
        (row,) = [r for r in _rows(storage) if (r["layer"], r["step"], r["rank"]) == ("layers.1", 4, 1)]
        flip_bit(Path(storage, "run/layercheck", row["file"]), 4 * (row["begin"] + row["end"]))
        deadline = time.monotonic() + 60
        while not list(Path(storage, "run/layercheck/blacklist").glob("*")):
            assert time.monotonic() < deadline, "the rotten byte was not found"
            time.sleep(0.02)

    return train(storage, STEPS, each_step=each_step, settings=SETTINGS)


def test_i1_i6_a_version_that_rots_is_replaced_while_training_goes_on(tmp_path: Path) -> None:
    storage = str(tmp_path / "store")
    results = run_ranks(2, tmp_path, _train_while_it_rots, storage)
    written = {(row["layer"], row["step"]) for row in _rows(storage) if row["step"] > 4}
    (again,) = written
    assert again[0] == "layers.1"
    assert ROTS_AT < again[1] <= STEPS
    for result in results:
        assert {step for step, report in result["reports"].items() if report.layers_written} == {4, again[1]}
        assert result["reports"][again[1]].max_age > 4, "it was as old as the version of step 0"
    alerts = [text for report in results[0]["reports"].values() for text in report.alerts]
    assert [text for text in alerts if "layers.1 of step 4 has rotted" in text]
