"""How good a model is on rows that it never saw: loss, and choices by the likelihood of their answers."""

from typing import Any

import torch

from app.config import Config
from app.data import Dataset, open_dataset
from app.forward import answer_loss, packed_logits
from app.measure.fidelity.regime import evaluated
from app.measure.fidelity.texts import NUM_CHOICES, Texts
from app.tokens import IGNORED
from layercheck.errors import LayerCheckError

_SEQUENCES = 32
_QUESTIONS = 8
_ROWS = 2 * NUM_CHOICES


class HeldOut:
    """Evaluates an engine, and leaves it in training mode.

    Args:
        config: of the run.
        texts: the held-out files.
    """

    def __init__(self, config: Config, texts: Texts) -> None:
        self._attention = config.model.attention
        self._rows = open_dataset(evaluated(config, texts.held_out, packing=True))
        self._choices = open_dataset(evaluated(config, texts.choices, packing=False))
        if len(self._choices) % _ROWS:
            raise LayerCheckError(
                f"{len(self._choices)} answers of {texts.choices} fit into a sequence: not {_ROWS} for each "
                "question"
            )

    def loss(self, engine: Any) -> float:
        """Mean cross entropy of the answer tokens."""
        total = 0.0
        num_labels = float(self._rows.num_labels.sum())
        engine.eval()
        with torch.no_grad():
            for batch in self._batches(self._rows, _SEQUENCES):
                total += float(answer_loss(engine, batch, self._attention, num_labels))
        engine.train()
        return total

    def accuracy(self, engine: Any) -> float:
        """Part of the questions whose right answer gains most from its question.

        Gain: mean log likelihood of the answer's tokens after the question, less that after a question that
        says nothing; so a common answer is not preferred. One that gains as much counts against the right
        one.
        """
        right = 0
        engine.eval()
        with torch.no_grad():
            for batch in self._batches(self._choices, _QUESTIONS * _ROWS):
                scores = mean_log_likelihood(packed_logits(engine, batch, self._attention), batch.labels)
                asked, unasked = scores.reshape(-1, 2, NUM_CHOICES).unbind(1)
                gain = asked - unasked
                right += int((gain[:, 0] > gain[:, 1:].max(-1).values).sum())
        engine.train()
        return right * _ROWS / len(self._choices)

    def _batches(self, dataset: Dataset, size: int) -> Any:
        for first in range(0, len(dataset), size):
            yield dataset.batch(list(range(first, min(first + size, len(dataset)))))


def mean_log_likelihood(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Of the labelled tokens of each row.

    Args:
        logits: shape (rows, tokens, vocabulary).
        labels: shape (rows, tokens); at least one of each row is not `IGNORED`.

    Returns:
        Shape (rows,).
    """
    wanted = labels[:, 1:].to(logits.device)
    log_p = torch.log_softmax(logits[:, :-1].float(), dim=-1)
    counts = wanted != IGNORED
    picked = log_p.gather(-1, wanted.clamp(min=0)[..., None])[..., 0]
    return (picked * counts).sum(-1) / counts.sum(-1)
