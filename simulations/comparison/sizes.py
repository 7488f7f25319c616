"""Comparisons of several model sizes side by side, as the paper shows them: figures 6 and 7, table 1."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from layercheck.errors import ConfigError
from simulations.comparison.pictures import PER_STEP, RECOVERY, bars_of_recovery, bars_of_regime
from simulations.comparison.result import FORMAT_VERSION, table
from simulations.pictures import draw_stacks


def read_comparisons(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """`comparison.json` of each folder, the smallest model first.

    Raises:
        ConfigError: there is none, it is of another format, two are of the same size, or one has other
            regimes than the first.
    """
    found: dict[str, dict[str, Any]] = {}
    regimes: list[str] = []
    for folder in folders:
        path = folder / "comparison.json"
        try:
            content = json.loads(path.read_text())
            version, size = content["format_version"], content["size"]
            number, names = float(content["parameters"]), sorted(dict(content["regimes"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(f"--from {folder}: {path} cannot be read ({error!r})") from None
        if version != FORMAT_VERSION:
            raise ConfigError(f"--from {folder}: format_version {version}, known is {FORMAT_VERSION}")
        if size in found:
            raise ConfigError(f"--from {folder}: a comparison of size {size!r} is there already")
        if number <= 0:
            raise ConfigError(f"--from {folder}: {path} says parameters={number:g}")
        regimes = regimes or names
        if names != regimes:
            raise ConfigError(f"--from {folder}: it has the regimes {names}, --from {folders[0]} {regimes}")
        found[size] = content
    return sorted(found.values(), key=lambda content: float(content["parameters"]))


def draw_sizes(contents: Sequence[Mapping[str, Any]], out: Path) -> str:
    """Draws `end-to-end-<regime>` and `recovery` of all sizes; returns table 1 as Markdown.

    Args:
        contents: of `read_comparisons`.
        out: folder, made if need be; `tables.md` is written there too.
    """
    out.mkdir(parents=True, exist_ok=True)
    for regime in contents[0]["regimes"]:
        panels = {_title(each): bars_of_regime(each["regimes"][regime]) for each in contents}
        draw_stacks(panels, out / f"end-to-end-{regime.replace('_', '-')}", PER_STEP)
    draw_stacks({_title(each): bars_of_recovery(each) for each in contents}, out / "recovery", RECOVERY)
    text = "\n".join([*_statistics(contents), "", *_recoveries(contents)]) + "\n"
    (out / "tables.md").write_text(text)
    return text


def _title(content: Mapping[str, Any]) -> str:
    return f"{content['parameters'] / 1e6:.0f} M parameters"


def _statistics(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Table 1: size, events, mean size and layer writes of each method; full events and bases aside."""
    body = [
        (
            _title(content),
            regime.replace("_", " "),
            method,
            f"{row['steps']}",
            f"{row['bytes_written'] / 1e9:.3f}",
            f"{row['events']}",
            f"{(row['mean_event_bytes'] or 0) / 1e6:.1f}",
            f"{row['layer_writes']}",
            f"{row['end_to_end_ratio']:.3f}",
        )
        for content in contents
        for regime, rows in content["regimes"].items()
        for method, row in rows.items()
    ]
    head = ("model", "regime", "method", "steps", "GB", "events", "MB / event", "layer writes", "time / none")
    return table(head, body)


def _recoveries(contents: Sequence[Mapping[str, Any]]) -> list[str]:
    """Figure 7 as figures."""
    body = [
        (
            _title(content),
            f"{content['recovery']['matched_interval_steps']}",
            method,
            f"{row['recovery_without_restart_s']:.2f}",
            f"{row['reconstruct_s']:.2f}",
            f"{row['recovery_s']:.2f}",
        )
        for content in contents
        for method, row in content["recovery"].items()
        if isinstance(row, dict)
    ]
    head = ("model", "interval", "method", "without restart (s)", "of it reconstruct (s)", "in all (s)")
    return table(head, body)
