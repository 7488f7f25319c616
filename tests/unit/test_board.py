"""The Grafana board and the alerts ask only for what the code exports."""

import pytest

from cluster.metrics import COUNTERS, GAUGES, tag_keys
from tests.boards import NAMES, alerts, board, queries
from tests.promql import asked

LABELS = {label for key in (*GAUGES, *COUNTERS) for label in tag_keys(key)}


@pytest.mark.parametrize("where", sorted(queries()))
def test_a_query_asks_only_for_metrics_and_labels_that_exist(where: str) -> None:
    found = asked(queries()[where])
    assert found.metrics
    assert found.metrics <= NAMES
    assert found.labels <= LABELS


def test_the_board_shows_every_metric() -> None:
    alerted = {rule["alert"] for group in alerts()["groups"] for rule in group["rules"]}
    shown = {
        name for where, text in queries().items() if where not in alerted for name in asked(text).metrics
    }
    assert shown == NAMES


def test_every_panel_says_what_it_shows_and_none_lies_over_another() -> None:
    panels = board()["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _ in cells) < 24
    assert all(panel["description"] and panel["title"] for panel in panels)
    assert len({panel["id"] for panel in panels}) == len(panels)


def test_an_alert_says_which_run_and_what_to_do() -> None:
    for group in alerts()["groups"]:
        for rule in group["rules"]:
            assert rule["labels"]["severity"] in ("warning", "critical")
            assert "{{ $labels.run }}" in rule["annotations"]["summary"]
            assert rule["annotations"]["description"]


@pytest.mark.parametrize(
    ("text", "metrics", "labels"),
    [
        ('max by (run) (a{run=~"x|y", zone!="z"})', {"a"}, {"run", "zone"}),
        ("sum(rate(a_total[5m])) / (b offset 1h or c * 0) > 0.5", {"a_total", "b", "c"}, set()),
        ("a unless on (run) b and c", {"a", "b", "c"}, {"run"}),
        ("topk(3, a:b:c)", {"a:b:c"}, set()),
    ],
)
def test_names_are_found_in_an_expression(text: str, metrics: set[str], labels: set[str]) -> None:
    found = asked(text)
    assert (found.metrics, found.labels) == (metrics, labels)
