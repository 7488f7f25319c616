"""What a session says of the warm-up while it runs: rank 0 alone, once, and true."""

import logging
from pathlib import Path

from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, train


def told(storage: str, steps: int) -> list[str]:
    """The lines of this rank while it trains up to `steps`."""
    lines: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    log, keep = logging.getLogger("layercheck"), Keep(logging.WARNING)
    log.addHandler(keep)
    try:
        train(storage, steps)
    finally:
        log.removeHandler(keep)
    return lines


def test_a_run_that_ends_in_its_warm_up_was_told_so_and_goes_back(tmp_path: Path) -> None:
    warm, every, store = CONFIG["warmup_steps"], CONFIG["warmup_full_every"], str(tmp_path / "store")
    begins = f"warm-up until step {warm}: a restart before its end goes back to the newest full copy, "
    first, silent = run_ranks(2, tmp_path, told, store, every + 2)
    assert [line for line in first if line.startswith("warm-up")] == [
        f"{begins}one every {every} steps (warmup_steps, warmup_full_every)"
    ]
    again, also_silent = run_ranks(2, tmp_path, told, store, warm + 3)
    (recovered,) = [line for line in again if line.startswith("recovered")]
    assert recovered.startswith(f"recovered (warmup_rollback) after step {every + 2} ")
    assert f"going on at step {every + 1} with all layers 2 steps old, " in recovered
    start, end = [line for line in again if line.startswith("warm-up")]
    assert start.startswith(begins)
    assert end.startswith(f"warm-up over at step {warm}: K0 = ")
    assert not [line for line in silent + also_silent if "warm-up" in line or "recovered" in line]
