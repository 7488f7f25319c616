"""Weights that come back from a residual are rounded: nothing says "at most" of what they lose."""

import json
from pathlib import Path

import pytest

from cluster.summary import show_receipt
from layercheck.cli import main
from layercheck.commands.status import describe
from layercheck.commands.watch import view
from layercheck.coordination import journal
from layercheck.lost import in_words
from layercheck.manifest import BadShard, EventId
from layercheck.persistence.storage import LocalStorage
from layercheck.receipt import Receipt
from layercheck.recovery.restore import in_words as recovered_in_words
from layercheck.report.receipts import receipt_section
from tests.runs import LAYERS, Group, with_base
from tests.unit.test_residual_store import LAYER

ROUNDED = "0.5 (mean_abs) beside the rounding of residuals"


def told(*residuals: int | None) -> Receipt:
    """A receipt of layers that came back with these residuals."""
    layer = {
        "step": 6, "attempt": 1, "age": 6, "lost": 2, "lost_drift": 0.5, "reason": "drift", "nbytes": 1,
        "fallback": False,
    }  # fmt: skip
    return Receipt(
        attempt=2, mode="composite", t_fail=12, t_fail_source="journal", resume_step=13, world_size=2,
        max_age=6, weighted_age=6.0, lost_steps=2.0, lost_drift=0.5, measure="mean_abs", nbytes=2,
        layers=tuple(layer | {"name": f"l{n}", "residual": step} for n, step in enumerate(residuals)),
    )  # fmt: skip


def saved(storage: LocalStorage) -> Group:
    """A run whose ranks tell of their movement; LAYER has a version of step 6 and a residual of step 9."""
    group = with_base(storage)
    group.save(6, LAYER)
    group.train(9)
    group.save_residual(9, LAYER, (6, 1))
    layer = {"moved": 0.5, "since": 9, "committed": 9, "pending": {}}
    state = group.state(12)
    state["layercheck"]["unsaved"] = {"measure": "mean_abs", "layers": dict.fromkeys(LAYERS, layer)}
    group.coordinator.heartbeat(group.attempt, 12, state, {})
    group.coordinator.close()
    return group


def test_the_words_leave_out_at_most_where_a_residual_comes_back() -> None:
    assert in_words(0.5, "mean_abs", residuals=True) == ROUNDED
    assert in_words(0.5, "mean_abs") == "at most 0.5 (mean_abs)"
    assert in_words(0.0, "mean_abs", residuals=True) == "0 beside the rounding of residuals"
    assert in_words(None, "", residuals=True) == "unknown"


@pytest.mark.parametrize("residual", [9, None])
def test_a_receipt_says_so_in_the_log_in_the_summary_and_on_the_page(residual: int | None) -> None:
    receipt = told(None, residual)
    words = ROUNDED if residual else "at most 0.5 (mean_abs)"
    assert f"movement {words};" in recovered_in_words(receipt)
    assert f"movement {words}," in show_receipt(receipt)
    assert f"movement {words}</li>" in receipt_section(receipt.model_dump())


@pytest.mark.parametrize("is_damaged", [True, False])
def test_status_plan_and_the_live_view_say_so_while_a_residual_would_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], is_damaged: bool
) -> None:
    storage = LocalStorage(str(tmp_path / "layercheck"))
    group = saved(storage)
    if is_damaged:
        file = EventId(step=9, attempt=1).shard_file(0)
        group.coordinator.rotten(BadShard(file=file, layer=LAYER, step=9, attempt=1, error="flipped"))
    facts = journal.load_facts(storage)
    main(["plan", str(storage.root)])
    for text in (describe(facts).text, view(facts).cost, capsys.readouterr().out):
        assert ("movement at most" in text) == is_damaged
        assert ("beside the rounding of residuals" in text) != is_damaged


def test_a_damaged_residual_is_not_told_as_an_older_version(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    storage = LocalStorage(str(tmp_path / "layercheck"))
    saved(storage)
    file = EventId(step=9, attempt=1).shard_file(0)
    main(["plan", str(storage.root), "--without", file])
    text = capsys.readouterr().out
    assert "not its newest save: that is damaged" in text
    assert "older version" not in text
    main(["plan", str(storage.root), "--without", file, "--json"])
    layers = {layer["name"]: layer for layer in json.loads(capsys.readouterr().out)["layers"]}
    assert (layers[LAYER]["step"], layers[LAYER]["fallback"]) == (6, True), "the version is the newest one"
