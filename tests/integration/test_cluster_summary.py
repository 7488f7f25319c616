"""The demonstration fails when it shows nothing, and says which part."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.summary import (
    failed_checks,
    loss_before,
    read_losses,
    read_receipts,
    read_summary,
    show_comparison,
    show_receipt,
)
from layercheck.coordination import journal
from layercheck.errors import LayerCheckError
from layercheck.manifest import AttemptRecord, LineageLink
from layercheck.persistence.storage import open_storage
from layercheck.receipt import Receipt

GOOD = {
    "run": "quickstart",
    "status": "completed",
    "steps": 90,
    "final_loss": 3.25,
    "attempts": 2,
    "failures": 1,
    "injected": [{"rank": 1, "step": 60}],
    "resumed": [{"t_fail": 60, "resume_step": 61, "ages": {"a": 3, "b": 7, "c": 0}}],
    "bytes_written": 40_000_000,
    "layer_writes_by_reason": {"full": 20, "drift": 31, "age": 0},
    "train_s": 60.0,
    "stall_s": 0.5,
    "wall_s": 100.0,
    "ettr": 0.8,
}


def changed(**resumed):
    return GOOD | {"resumed": [GOOD["resumed"][0] | resumed]}


def test_a_good_run_passes():
    assert failed_checks(GOOD, 60) == []
    assert failed_checks(changed(t_fail=59, resume_step=60), 60) == []


@pytest.mark.parametrize(
    ("summary", "message"),
    [
        (GOOD | {"status": "failed"}, "status is 'failed'"),
        (GOOD | {"injected": []}, "without the kill"),
        (GOOD | {"resumed": []}, "no recovery"),
        (changed(t_fail=58, resume_step=59), "t_fail is 58"),
        (changed(resume_step=70), "not at t_fail"),
        (changed(ages={"a": 3, "b": 3, "c": 0}), "fewer than three"),
        (GOOD | {"layer_writes_by_reason": {"full": 20, "age": 4}}, "because of its drift"),
    ],
)
def test_each_wrong_part_is_named(summary, message):
    (wrong,) = failed_checks(summary, 60)
    assert message in wrong


def test_the_receipt_shows_every_layer_with_its_age_and_the_fallback():
    layer = {"step": 58, "attempt": 1, "age": 2, "lost": 2, "reason": "drift", "nbytes": 10}
    receipt = Receipt(
        attempt=2,
        mode="composite",
        t_fail=60,
        t_fail_source="live",
        resume_step=61,
        world_size=2,
        max_age=2,
        weighted_age=2.0,
        lost_steps=2.0,
        nbytes=20,
        layers=(
            {**layer, "name": "layers.0", "fallback": False},
            {**layer, "name": "norm", "fallback": True},
        ),
        fetch_s=0.25,
    )
    text = show_receipt(receipt)
    assert "went on at step 61" in text
    assert "layers.0              58     2     2  drift\n" in text
    assert "norm                  58     2     2  drift  (not its newest save: that is damaged)" in text
    assert "fetch 0.25 s" in text
    assert "20 steps later" not in text
    told = receipt.model_copy(update={"loss_20_steps_later": 5.5})
    assert "loss unknown at step 60, before; 5.5000 at step 80, 20 steps later" in show_receipt(told)
    text = show_receipt(told, 5.75, {60: 5.7, 80: 5.4})
    assert "loss 5.7500 (without the failure 5.7000) at step 60, before; " in text
    assert "5.5000 (without the failure 5.4000) at step 80, 20 steps later" in text


def test_losses_come_from_the_rows_and_from_the_record_of_the_attempt(tmp_path):
    (tmp_path / "run/metrics").mkdir(parents=True)
    rows = [{"step": 1, "loss": 6.0}, {"step": 2, "loss": None}, {"step": 3, "loss": 5.0}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "run/metrics/attempt-001-00000.parquet")
    assert read_losses(tmp_path / "run") == {1: 6.0, 3: 5.0}
    store = open_storage(str(tmp_path), "run")
    record = AttemptRecord(
        attempt=2, token="t", submission="s", world_size=2, mode="composite", r_b=2,
        trainer_state={"step": 2, "loss": 5.5},
        lineage=(LineageLink(attempt=2, r_b=2, predecessor=1, saw_step=2),),
    )  # fmt: skip
    journal.claim_attempt(store, record)
    assert loss_before(tmp_path / "run", 2) == 5.5
    assert loss_before(tmp_path / "run", 3) is None


def test_the_comparison_counts_full_checkpoints_at_every_step():
    text = show_comparison(GOOD, GOOD | {"final_loss": 3.0}, full_bytes=2_000_000)
    assert "seconds from start to end                100.0       100.0\n" in text
    assert "of these in training steps                60.0        60.0\n" in text
    assert "3.2500      3.0000" in text
    assert "180.0 MB, 4.5 times as much" in text


def test_a_run_without_a_summary_is_an_error_that_names_the_file(tmp_path):
    with pytest.raises(LayerCheckError, match=r"summary\.json is missing"):
        read_summary(tmp_path)
    (tmp_path / "summary.json").write_text(json.dumps(GOOD))
    assert read_summary(tmp_path)["steps"] == 90
    assert read_receipts(tmp_path) == []
