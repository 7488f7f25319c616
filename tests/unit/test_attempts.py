"""What rank 0 notes of an attempt: complete at its end, and never by the training thread."""

import json
import threading
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

from app.baselines.attempts import AttemptBook, Before, receipt_of
from app.baselines.protocol import Recovered
from layercheck.layers import LayerMap
from layercheck.persistence.file_calls import Buffer
from layercheck.persistence.storage import LocalStorage
from layercheck.step_report import StepReport


class WatchedStorage(LocalStorage):
    """Notes the threads that write."""

    def __init__(self, root: str) -> None:
        super().__init__(root)
        self.writers: list[str] = []

    def write(self, path: str, chunks: Iterable[Buffer]) -> None:
        self.writers.append(threading.current_thread().name)
        super().write(path, chunks)


def test_the_steps_after_a_recovery_wait_for_no_write_and_their_times_are_noted(tmp_path: Path) -> None:
    storage = WatchedStorage(str(tmp_path))
    found = Recovered(step=4, trainer_state={}, plan_s=0, load_s=0, reconstruct_s=0, nbytes=1, source="here")
    receipt = receipt_of(found, Before(1, 6), 2, LayerMap(layers=()), 2)
    began = {"submission": "one", "world_size": 2, "r_b": 4}
    book = AttemptBook(storage, "m", 2, began, receipt, flush_s=60)
    storage.writers.clear()
    for step in (5, 6, 7):
        book.stepped(StepReport(step), {"loss": 1.0}, 1e-3)
    assert threading.current_thread().name not in storage.writers
    book.close("completed", {})
    noted = SimpleNamespace(**json.loads((tmp_path / "m/attempts/a002.receipt.json").read_text()))
    assert 0 <= noted.first_step_s <= noted.replay_s
