"""A node is lost for good: the run goes on with fewer workers and the same global batch."""

import json
from pathlib import Path

import pytest

from cluster.head import start_head, start_node
from tests.e2e.runs import finish, metrics, progress_step, start_app, summary, wait_until

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]
STEPS = 40


def test_a_lost_node_costs_a_worker_and_no_step(tmp_path: Path) -> None:
    settings = {"train.steps": STEPS, "cluster.workers": 2, "cluster.min_workers": 1}
    with start_head(num_cpus=1) as head, start_node(head, num_cpus=1) as second:
        process = start_app(head, tmp_path, "elastic", **settings)
        wait_until(lambda: progress_step(tmp_path / "elastic", 1) >= 14, process)
        second.kill()
        code, output = finish(process)
    assert code == 0, output[-4000:]
    found = summary(tmp_path / "elastic")
    assert (found["status"], found["steps"], found["world_size"]) == ("completed", STEPS, 1)
    attempts = sorted((tmp_path / "elastic/layercheck/attempts").glob("a???.json"))
    assert [json.loads(path.read_text())["world_size"] for path in attempts] == [2, 1]
    (resumed,) = found["resumed"]
    assert resumed["resume_step"] == resumed["t_fail"] + 1
    steps = [row["step"] for row in metrics(tmp_path / "elastic") if row["attempt"] == 2]
    assert [step for step in steps if step > 0] == list(range(resumed["resume_step"], STEPS + 1))
