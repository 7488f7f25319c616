"""The parts of a fidelity run that need no engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.measure.fidelity import tuning
from app.measure.fidelity.held_out import mean_log_likelihood
from app.measure.fidelity.spec import Length, RunSpec
from app.tokens import IGNORED


def test_the_likelihood_is_a_mean_over_the_labelled_tokens() -> None:
    probabilities = torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1], [0.5, 0.5]]])
    # The logits of a place speak of the label of the next one; the first label has none.
    labels = torch.tensor([[0, IGNORED, 1, 0]])
    found = mean_log_likelihood(probabilities.log(), labels)
    assert found.tolist() == pytest.approx([(torch.tensor([0.75, 0.9]).log().sum() / 2).item()])


class _Life(tuning.Tuning):
    """Lives without engines: each has a loader that notes its end."""

    def __init__(self, spec: RunSpec) -> None:
        self._spec, self._config, self._notes = spec, None, tuning._Notes()  # type: ignore[assignment]
        self._held_out: Any = SimpleNamespace(loss=lambda engine: 1.0)
        self.ended: list[int] = []

    def _job(self, model_config: Any) -> Any:
        life = self.__dict__.setdefault("lives", 0)
        self.lives = life + 1
        loader = SimpleNamespace(close=lambda: self.ended.append(life))
        return SimpleNamespace(engine=SimpleNamespace(destroy=lambda: None), loader=loader)

    def _train(self, *_: Any) -> None: ...
    def _note_recovery(self, *_: Any) -> None: ...
    def _outcome(self, job: Any) -> Any: ...


def test_every_life_of_a_run_ends_its_reading_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    length = Length(base_steps=1, steps=9, every=3, last_every=1, num_last=1, train_rows=9, held_out_rows=1)
    points = iter([SimpleNamespace(step=1), *(SimpleNamespace(step=step, receipt=1) for step in (4, 7))])
    session = SimpleNamespace(resume=lambda: next(points), close=lambda *_: None)
    monkeypatch.setattr(tuning, "open_session", lambda *_: session)
    monkeypatch.setattr(tuning, "unlike", lambda *_, **__: None)
    life = _Life(RunSpec(seed=0, length=length, checkpoint={}, failures=(3, 6)))
    life.run()
    assert life.ended == [0, 1, 2]
