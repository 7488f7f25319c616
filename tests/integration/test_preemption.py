"""One rank is told that it will be ended; all ranks save what moved and stop, and the next start goes on."""

import json
import os
import signal
import time
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from layercheck.errors import PreemptedError
from layercheck.persistence.storage import LocalStorage
from tests import micro
from tests.harness import run_ranks
from tests.integration.ranks import CONFIG, open_session, train, train_without_session

TOLD_AT, STEPS = 13, 20
SAVED_AT = TOLD_AT + 1


def _tell_rank_1(session: Any, step: int, how: int = signal.SIGTERM) -> None:
    """A real signal, to one rank alone."""
    if (session._zero3.rank, step) == (1, TOLD_AT):
        os.kill(os.getpid(), how)


def _parts(storage: Path) -> dict[str, list[dict[str, Any]]]:
    """Folder of each part of the last save -> rows of its commit; a folder without one is left out."""
    folders = sorted((storage / "run/layercheck/events").glob(f"step-{SAVED_AT:08d}.*"))
    commits = [folder / "commit.parquet" for folder in folders]
    return {file.parent.name: pq.read_table(file).to_pylist() for file in commits if file.is_file()}


def _progress(storage: Path) -> dict[str, Any]:
    return json.loads((storage / "run/layercheck/attempts/a001.progress.json").read_text())


def test_i10_a_sigterm_to_one_rank_saves_all_layers_in_parts_and_the_restart_is_exact(tmp_path: Path) -> None:
    storage = tmp_path / "store"
    reference = run_ranks(2, tmp_path, train_without_session, STEPS)[0]
    told = partial(train, each_step=_tell_rank_1)
    for result in run_ranks(2, tmp_path, told, str(storage), STEPS):
        assert max(result["losses"]) == SAVED_AT, "both ranks ended after the step that followed the signal"
        assert result["reports"][SAVED_AT].preempted
        assert not result["reports"][TOLD_AT].preempted
        assert result["reports"][SAVED_AT].max_age == 0
    assert _progress(storage)["ended"] == "preempted"

    parts = _parts(storage)
    assert list(parts) == [f"step-{SAVED_AT:08d}.a001.p{n:02d}" for n in range(1, len(parts) + 1)]
    assert len(parts) > 1
    rows = [row for part in parts.values() for row in part]
    assert {row["reason"] for row in rows} == {"preemption"}
    total = sum(row["nbytes"] for row in rows)
    for part in parts.values():
        share = sum(row["nbytes"] for row in part) / total
        assert share <= 0.15 or len({row["layer"] for row in part}) == 1

    for result in run_ranks(2, tmp_path, partial(train, seed=99), str(storage), STEPS):
        assert result["first"] == SAVED_AT + 1
        assert result["receipt"]["max_age"] == 0
        assert result["losses"] == {step: reference[step] for step in range(SAVED_AT + 1, STEPS + 1)}


class StuckAtPart3(LocalStorage):
    """A store that takes the first parts of a last save and is too slow for the third."""

    def write(self, path: str, chunks: Iterable[Any]) -> None:
        if ".p03/rank" in path:
            time.sleep(60)
        super().write(path, chunks)


def _train_on_stuck_storage(storage: str) -> dict[str, Any]:
    store = StuckAtPart3(f"{storage}/run/layercheck")
    usr1 = partial(_tell_rank_1, how=signal.SIGUSR1)
    settings = {"preemption_grace_s": 2, "preemption_signals": ("SIGUSR1",)}
    started = time.monotonic()
    result = train(storage, STEPS, each_step=usr1, settings=settings, store=store)
    return result | {"wall_s": time.monotonic() - started}


@pytest.mark.slow
def test_where_the_time_is_short_what_was_committed_counts_and_the_rest_is_older(tmp_path: Path) -> None:
    storage = tmp_path / "store"
    results = run_ranks(2, tmp_path, _train_on_stuck_storage, str(storage))
    assert all(result["reports"][SAVED_AT].preempted for result in results)
    assert results[0]["reports"][SAVED_AT].max_age > 0
    parts = _parts(storage)
    assert [name[-3:] for name in parts] == ["p01", "p02"]
    saved = {row["layer"] for part in parts.values() for row in part}
    drift = [max(row["drift"] for row in part) for part in parts.values()]
    assert all(value > 0 for value in drift)

    result = run_ranks(2, tmp_path, partial(train, seed=99), str(storage), SAVED_AT + 3)[0]
    ages = {layer["name"]: layer["age"] for layer in result["receipt"]["layers"]}
    assert {name for name, age in ages.items() if age == 0} == saved
    assert len(saved) < len(ages)
    assert max(ages.values()) <= CONFIG["s_max"]
    assert result["first"] == SAVED_AT + 1, "not even a short time costs a step"


def _go_on_after_the_end(storage: str) -> tuple[bool, str]:
    engine = micro.build()
    session = open_session(engine, storage)
    step = session.resume().step
    session.preempt(grace_s=20)
    micro.train_step(engine, step)
    preempted = session.after_step(step).preempted
    micro.train_step(engine, step + 1)
    with pytest.raises(PreemptedError, match=f"step {step + 1}: end the loop") as caught:
        session.after_step(step + 1)
    session.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    return preempted, caught.value.message


def test_a_loop_that_goes_on_after_the_last_save_is_stopped_by_an_error(tmp_path: Path) -> None:
    ((preempted, message),) = run_ranks(1, tmp_path, _go_on_after_the_end, str(tmp_path / "store"))
    assert preempted
    assert "preempted" in message
    assert (tmp_path / "store/run/layercheck/events/step-00000001.a001.p01/commit.parquet").is_file()
