"""The queries of the Grafana board and of the alerts."""

import json
import re
from pathlib import Path

import yaml

from cluster.metrics import COUNTERS, GAUGES, PREFIX

GRAFANA = Path(__file__).resolve().parents[1] / "cluster" / "grafana"
NAMES = {f"ray_{PREFIX}{key}" for key in GAUGES} | {f"ray_{PREFIX}{key}_total" for key in COUNTERS}
"""What the code can export, as a scraper sees it."""


def board() -> dict:
    found: dict = json.loads((GRAFANA / "board.json").read_text())
    return found


def alerts() -> dict:
    found: dict = yaml.safe_load((GRAFANA / "alerts.yaml").read_text())
    return found


def queries() -> dict[str, str]:
    """Where a query stands -> its text; `$run` is what Grafana puts there."""
    found = {
        f"{panel['title']} {target['refId']}": target["expr"].replace("$run", ".*")
        for panel in board()["panels"]
        for target in panel["targets"]
    }
    for variable in board()["templating"]["list"]:
        if match := re.fullmatch(r"label_values\((\w+), \w+\)", variable["query"]):
            found[f"variable {variable['name']}"] = match[1]
    rules = [rule for group in alerts()["groups"] for rule in group["rules"]]
    return found | {rule["alert"]: rule["expr"] for rule in rules}
