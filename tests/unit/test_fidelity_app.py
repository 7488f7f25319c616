"""The parts of a fidelity run that need no engine."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from app.measure.fidelity import moments
from app.measure.fidelity.held_out import mean_log_likelihood
from app.tokens import IGNORED


def test_the_likelihood_is_a_mean_over_the_labelled_tokens() -> None:
    probabilities = torch.tensor([[[0.5, 0.5], [0.25, 0.75], [0.9, 0.1], [0.5, 0.5]]])
    # The logits of a place speak of the label of the next one; the first label has none.
    labels = torch.tensor([[0, IGNORED, 1, 0]])
    found = mean_log_likelihood(probabilities.log(), labels)
    assert found.tolist() == pytest.approx([(torch.tensor([0.75, 0.9]).log().sum() / 2).item()])


class _Engine:
    """Two layers, a sub-group each; `embed` has no moment yet."""

    def __init__(self) -> None:
        self.moments = {"embed": None, "layers.0": torch.ones(3)}
        self.slices = {
            name: [SimpleNamespace(sub_group=index, layer=name)] for index, name in enumerate(self.moments)
        }
        self.sub_groups = [SimpleNamespace(group=0), SimpleNamespace(group=1)]
        self.optimizer = SimpleNamespace(param_groups=[{"betas": (0.5, 0.9)}, {"betas": (0.9, 0.99)}])

    def tensors(self, part: Any) -> dict[str, Any]:
        found = self.moments[part.layer]
        return {} if found is None else {"exp_avg": found, "exp_avg_sq": torch.ones(3)}


@pytest.mark.parametrize(("how", "left"), [("keep", 1.0), ("scale", 0.9**4), ("zero", 0.0)])
def test_a_stale_first_moment_is_kept_scaled_or_dropped(
    how: Any, left: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = _Engine()
    monkeypatch.setattr(moments, "Zero3Engine", lambda engine: engine)
    moments.treat_moments(engine, {"embed": 7, "layers.0": 4}, how)
    assert engine.moments["layers.0"].tolist() == pytest.approx([left] * 3)
