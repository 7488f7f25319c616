"""Ray metrics of a coordinator: what is counted, what is not counted twice, what a scraper gets to see."""

import re
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from cluster.metrics import COUNTERS, GAUGES, PREFIX, Metrics, VaultMetrics
from layercheck.coordination.protocol import HeartbeatReply
from layercheck.manifest import EventId

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture
def metrics() -> Metrics:
    return Metrics("run")


def record(metrics: Metrics, step: int, attempt: int = 1, ranks: int = 2, part: int = 0) -> None:
    for rank in range(ranks):
        event = EventId(step=step, attempt=attempt, part=part)
        metrics.saw("record", (event, rank, (SimpleNamespace(nbytes=35),), {}), None)


def counted(metrics: Metrics) -> dict[str, float]:
    """What was set and counted, but for what depends on the clock."""
    return {key: value for key, value in metrics.values.items() if key not in ("step_seconds", "ettr")}


def beat(
    metrics: Metrics, step: int, attempt: int = 1, costs: dict[str, Any] | None = None, **reply: Any
) -> None:
    state = {"step": step, "layercheck": {"costs": costs or {}}}
    metrics.saw("heartbeat", (attempt, step, state, {}), HeartbeatReply(**reply))


def test_bytes_events_and_lost_saves_are_counted_once(metrics: Metrics) -> None:
    for step in (1, 2, 3, 4):
        record(metrics, step)
    record(metrics, 3)  # told again
    beat(metrics, 5, committed_step=3, lost_steps=(2,))
    beat(metrics, 5, committed_step=3, lost_steps=(2,))
    record(metrics, 3)
    assert counted(metrics) == {
        "attempt": 1, "step": 5, "committed_step": 3, "shard_bytes": 8 * 35, "failed_saves": 1, "events": 2,
    }  # fmt: skip
    record(metrics, 4, part=1)
    beat(metrics, 6, committed_step=4, committed_part=1, lost_steps=(2,))
    assert metrics.values["events"] == 4


def test_what_only_the_ranks_know_comes_with_the_heartbeat(metrics: Metrics) -> None:
    known = {
        "max_age": 7, "weighted_age": 2.5, "lost_steps": 1.5, "lost_drift": 0.25, "drift_ratio": 0.9,
        "inflight_bytes": 4096.0,
    }  # fmt: skip
    beat(metrics, 1, costs={**known, "stall_s": 1.5, "skipped_copies": 2})
    beat(metrics, 2, costs={**known, "max_age": 8, "stall_s": 2.0, "skipped_copies": 3})
    beat(metrics, 1, costs={**known, "max_age": 99, "stall_s": 1.5})  # an older one, delayed on its way
    assert counted(metrics) == known | {
        "attempt": 1, "step": 2, "committed_step": -1, "max_age": 8, "stall_seconds": 2.0,
        "skipped_copies": 3,
    }  # fmt: skip


def test_a_new_attempt_goes_on_counting_and_a_zombie_does_not(metrics: Metrics) -> None:
    record(metrics, 9)
    beat(metrics, 9, costs={"stall_s": 3.0}, committed_step=9, lost_steps=(5,))
    record(metrics, 7, attempt=2)  # may come before the first heartbeat of its attempt
    beat(metrics, 6, attempt=2, costs={"stall_s": 0.5}, lost_steps=(5,))
    beat(metrics, 10, attempt=1, costs={"stall_s": 4.0}, committed_step=10)
    record(metrics, 10, attempt=1)
    beat(metrics, 7, attempt=2, costs={"stall_s": 0.5}, committed_step=7, lost_steps=(5,))
    assert counted(metrics) == {
        "attempt": 2, "step": 7, "committed_step": 7, "shard_bytes": 4 * 35, "failed_saves": 2, "events": 2,
        "stall_seconds": 3.5,
    }  # fmt: skip


def test_a_heartbeat_without_figures_is_fine(metrics: Metrics) -> None:
    metrics.saw("heartbeat", (1, 4, {"step": 4}, {}), HeartbeatReply())
    metrics.saw("heartbeat", (1, 5, {}, {}), HeartbeatReply(fenced=True))
    metrics.saw("status", (), {})
    assert counted(metrics) == {"attempt": 1, "step": 4, "committed_step": -1}


def test_a_recovery_counts_once_and_each_phase_when_it_is_known(metrics: Metrics) -> None:
    lost = {"lost_steps": 1.5, "lost_drift": 0.25}
    seconds = {"detect_s": None, "plan_s": 0.25, "fetch_s": 0.5, "install_s": 0.0, "first_step_s": None}
    receipt = lost | seconds
    metrics.saw("note_receipt", (2, receipt), None)
    metrics.saw("note_receipt", (2, receipt | {"first_step_s": 1.5}), None)
    metrics.saw("note_receipt", (2, receipt | {"first_step_s": 1.5, "loss_20_steps_later": 2.0}), None)
    metrics.saw("note_receipt", (3, {"plan_s": 0.5}), None)
    assert metrics.values == {
        "recovery_lost_steps": 1.5, "recovery_lost_drift": 0.25,
        "recoveries": 2, "recovery_seconds.plan": 0.75, "recovery_seconds.fetch": 0.5,
        "recovery_seconds.first_step": 1.5,
    }  # fmt: skip


def test_the_age_limit_is_that_of_the_newest_settings() -> None:
    metrics = Metrics("run", s_max=400)
    metrics.limit(48)
    assert metrics.values == {"s_max": 48}


def test_the_document_names_every_metric_and_no_other() -> None:
    text = Path(__file__).resolve().parents[2].joinpath("docs/reference/metrics.md").read_text()
    named = set(re.findall(r"^\| `ray_layercheck_(\w+)`", text, re.MULTILINE))
    assert named == {*GAUGES, *(f"{key}_total" for key in COUNTERS)}


def test_a_scraper_sees_every_documented_name(metrics: Metrics) -> None:
    record(metrics, 1)
    costs = {
        "max_age": 7, "weighted_age": 2.5, "lost_steps": 1.5, "lost_drift": 0.25, "drift_ratio": 0.9,
        "inflight_bytes": 4096.0, "stall_s": 1.5,
    }  # fmt: skip
    metrics.limit(40)
    VaultMetrics("run").looked(4096)
    beat(metrics, 1, costs=costs)
    beat(metrics, 2, costs=costs, committed_step=1, lost_steps=(0,))
    metrics.saw("note_receipt", (1, {"fetch_s": 0.5, "lost_steps": 1.5, "lost_drift": 0.25}), None)
    node = next(node for node in ray.nodes() if node["Alive"])
    address = f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
    wanted = {f"ray_{PREFIX}{key}" for key in GAUGES} | {f"ray_{PREFIX}{key}_total" for key in COUNTERS}
    deadline, seen = time.monotonic() + 60, set()
    while time.monotonic() < deadline and not wanted <= seen:
        with urllib.request.urlopen(address, timeout=10) as reply:
            seen = set(re.findall(r"^(ray_layercheck_\w+)\{", reply.read().decode(), re.MULTILINE))
        time.sleep(0.5)
    assert wanted <= seen
