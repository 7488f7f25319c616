"""The sweep as Ray tasks gives the numbers of the sweep in one process."""

import pyarrow.parquet as pq
import pytest

from layercheck.errors import LayerCheckError
from simulations import ettr, ray_tasks

ARGUMENTS = ["--costs", "paper", "--points", "2", "--seeds", "60", "--days", "0.5", "--no-pictures"]


@pytest.mark.ray
def test_ray_tasks_and_one_process_give_the_same_numbers(ray_cluster, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RAY_ADDRESS", ray_cluster)
    assert ettr.main([*ARGUMENTS, "--out", str(tmp_path / "ray")]) == 0
    assert "as Ray tasks" in capsys.readouterr().out
    assert ettr.main([*ARGUMENTS, "--out", str(tmp_path / "here"), "--here"]) == 0
    assert "in one process" in capsys.readouterr().out
    tables = [pq.read_table(tmp_path / name / "ettr.parquet") for name in ("ray", "here")]
    assert tables[0].num_rows == 12
    assert tables[0].equals(tables[1])


@pytest.mark.ray
def test_a_cluster_that_runs_no_task_is_one_error(ray_cluster, monkeypatch):
    import ray

    @ray.remote
    def never() -> None:
        import time

        time.sleep(3600)

    monkeypatch.setattr(ray_tasks, "_WAIT_S", 0.5)
    reference = never.remote()
    with pytest.raises(LayerCheckError, match=r"no simulation task within 0\.5 s"):
        ray_tasks._get(ray, reference)
    ray.cancel(reference, force=True)
