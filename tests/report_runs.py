"""Runs for the report page: rows as a session writes them, a store with a recovery; a strict parser."""

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

from layercheck.commands.store import open_both
from layercheck.persistence.storage import open_run_folder
from layercheck.report.data import RunReport, gather
from layercheck.tracking.metrics_log import DRIFT, METRICS, PartWriter
from tests.runs import LAYERS
from tests.stores import RealRun, real_run

VOID = {"meta", "br", "rect", "path", "line", "input"}
NUMEL = {"embed_tokens": 10, "layers.0": 20, "norm": 30}


class Page(HTMLParser):
    """Every element with its attributes; complains about a tag that is not closed in its turn."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self._open.pop() == tag, f"line {self.getpos()[0]}: </{tag}>"

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text.append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.elements if name == tag]


def log_steps(folder: Path, attempt: int, first: int, last: int, *, threshold: float | None = 2.0) -> None:
    """Rows of steps as a session writes them: D grows by 0.5 a step, `norm` is saved at each sixth step."""
    store = open_run_folder(str(folder.parent), folder.name)
    metrics = PartWriter(store, "metrics", attempt, 1e9, METRICS)
    drift = PartWriter(store, "drift", attempt, 1e9, DRIFT)
    for step in range(first, last + 1):
        metrics.add(
            {
                "step": step, "loss": 10.0 - step / 10 - attempt / 100, "lr": 1e-3, "step_s": 2.0,
                "stall_s": 0.5 if step == 6 else 0.0, "layers_written": int(step % 6 == 0),
                "bytes_written": 0, "max_age": step % 6 + 3, "weighted_age": step % 6 + 0.5,
            }
        )  # fmt: skip
        for layer in LAYERS:
            saved = layer == "norm" and step % 6 == 0
            drift.add(
                {
                    "step": step, "layer": layer, "delta": 0.5, "drift": 0.5 * ((step - 1) % 6 + 1),
                    "threshold": threshold, "age": 1, "numel": NUMEL[layer], "nbytes": 120 if saved else 0,
                }
            )  # fmt: skip
    assert metrics.close()
    assert drift.close()


def look(folder: Path) -> RunReport:
    store = open_both(str(folder))
    return gather(store.layercheck, store.run, store.facts())


RECEIPT = {
    "attempt": 2, "mode": "composite", "t_fail": 14, "t_fail_source": "journal", "resume_step": 15,
    "world_size": 2, "max_age": 10, "weighted_age": 4.33, "lost_steps": 4.25, "nbytes": 240,
    "layers": [
        {"name": "norm", "step": 4, "attempt": 1, "age": 10, "lost": 10, "reason": "full", "nbytes": 120,
         "fallback": True},
    ],
    "bad": [{"file": "events/x/rank-00000.safetensors", "layer": "norm", "step": 10, "attempt": 1,
             "error": "checksum <b>wrong</b>"}],
    "detect_s": None, "reschedule_s": 9.5, "plan_s": 0.25, "fetch_s": 0.5, "install_s": 0.125,
    "first_step_s": 1.5, "rng": "keyed", "loss_20_steps_later": None,
}  # fmt: skip


def recovered_run(folder: Path) -> Path:
    """Attempt 1 ran to step 14 and was cut off, its last rows lost with it; attempt 2 goes on to step 20."""
    run = real_run(folder)
    log_steps(folder, 1, 1, 12)
    second = RealRun(folder, token="t2")
    second.selected = dict(run.selected)
    second.coordinator.note_receipt(2, RECEIPT)
    second.train(20, since=14)
    second.save(18, "norm", reason="age")
    second.end()
    log_steps(folder, 2, 15, 20)
    return folder
