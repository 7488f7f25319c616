"""The board and the alerts against what a running job really serves to a scraper."""

import json
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.head import PrivateHead, start_head
from tests.boards import NAMES, queries
from tests.e2e.runs import finish, start_app
from tests.promql import asked

pytestmark = [pytest.mark.slow, pytest.mark.ray, pytest.mark.timeout(600)]
NEVER_HERE = {"ray_layercheck_failed_saves_total"}
"""No save fails in this run, and a counter that never counted is not served."""


@pytest.fixture
def head() -> Iterator[PrivateHead]:
    with start_head(num_cpus=4) as started:
        yield started


def served(head: PrivateHead) -> dict[str, set[str]]:
    """Sample name -> names of its labels, from every target that the head announces to a Prometheus."""
    found: dict[str, set[str]] = {}
    announced = json.loads((head.folder / "r" / "prom_metrics_service_discovery.json").read_text())
    for target in (target for entry in announced for target in entry["targets"]):
        try:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as reply:
                text = reply.read().decode()
        except (urllib.error.URLError, TimeoutError):
            continue  # announced before it listens
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if sample.name.startswith("ray_layercheck_"):
                    found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_a_running_job_serves_all_that_the_board_asks_for(head: PrivateHead, tmp_path: Path) -> None:
    kill = {"faults.kill": "[{rank: 1, step: 12, times: 1}]", "train.steps": 60}
    run = start_app(head, tmp_path, "scraped", **kill)
    seen: dict[str, set[str]] = {}
    deadline = time.monotonic() + 300
    while not seen.keys() >= NAMES - NEVER_HERE:
        assert run.poll() is None, f"ended before all was seen; missing {NAMES - NEVER_HERE - seen.keys()}"
        assert time.monotonic() < deadline, f"not served in time: {NAMES - NEVER_HERE - seen.keys()}"
        for name, labels in served(head).items():
            seen.setdefault(name, set()).update(labels)
        time.sleep(0.5)
    code, output = finish(run)
    assert code == 0, output[-3000:]
    as_gauge = {name.removesuffix("_total") for name in NAMES}  # Ray serves a counter under both names
    assert seen.keys() - NAMES - as_gauge == set()
    for where, text in queries().items():
        wanted = asked(text)
        metrics = wanted.metrics - NEVER_HERE
        assert metrics <= seen.keys(), where
        for name in metrics:
            assert wanted.labels <= seen[name], (where, name)
