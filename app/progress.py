"""What a person sees of a run while it goes: steps, loss, speed, and what protection costs."""

import statistics
import time
from typing import Any

from app.config import Config
from app.curves import Curves
from app.step_log import LoggedStep, StepLog
from layercheck.step_report import StepReport


class Meter:
    """Collects the steps since the last report. Seconds are those of this rank."""

    def __init__(self, config: Config, total_steps: int, rank: int) -> None:
        self.steps = 0
        """Steps seen in the life of this process."""
        self._every_s = config.report_every_s
        self._tokens_per_step = config.train.global_batch * config.data.seq_len
        self._total_steps = total_steps
        self._log = StepLog.of(config.faults.step_log, rank)
        self._curves = Curves.of(config, rank)
        self._step_s: list[float] = []
        self._reported = self._began = time.monotonic()
        self._recent: list[StepReport] = []
        self._step, self._loss, self._lr = 0, float("nan"), float("nan")

    def begin(self) -> None:
        """A step begins."""
        self._began = time.monotonic()

    def end(self, step: int, loss: float, lr: float, report: StepReport) -> None:
        """A step has ended, saving included."""
        now = time.monotonic()
        self._step_s.append(now - self._began)
        self.steps, self._step, self._loss, self._lr = self.steps + 1, step, loss, lr
        self._recent.append(report)
        if self._log is not None:
            self._log.note(LoggedStep(step, self._began, now, report.stall_s, report.bytes_written))
        if self._curves is not None:
            self._curves.note(step, {"loss": loss, "lr": lr, "step_s": now - self._began} | _costs(report))

    def report_due(self) -> bool:
        """True on the first step and every `report_every_s`; only rank 0's answer counts."""
        return self.steps == 0 or time.monotonic() - self._reported >= self._every_s

    def has_news(self) -> bool:
        """Whether a step has ended since the last report; the same on all ranks."""
        return bool(self._recent)

    def report(self) -> dict[str, Any]:
        """The numbers since the last report; starts the next period."""
        now = time.monotonic()
        recent, elapsed = self._recent, max(now - self._reported, 1e-9)
        self._reported, self._recent = now, []
        return {
            "step": self._step,
            "steps": self._total_steps,
            "loss": self._loss,
            "lr": self._lr,
            "tokens_per_s": len(recent) * self._tokens_per_step / elapsed,
            "layers_written": sum(report.layers_written for report in recent),
            "max_age": recent[-1].max_age if recent else 0,
            "weighted_age": recent[-1].weighted_age if recent else 0.0,
            "stall_s": sum(report.stall_s for report in recent),
        }

    def median_step_s(self) -> float | None:
        """Median seconds of a step, None without steps."""
        return statistics.median(self._step_s) if self._step_s else None

    def close(self) -> None:
        """The last step is done, or the run ends before it."""
        if self._curves is not None:
            self._curves.close()

    @staticmethod
    def line(metrics: dict[str, Any]) -> str:
        """One report for a person."""
        return (
            f"step {metrics['step']}/{metrics['steps']}  loss {metrics['loss']:.4f}  lr {metrics['lr']:.2e}  "
            f"{metrics['tokens_per_s']:.0f} tokens/s  {metrics['layers_written']} layers written  "
            f"max age {metrics['max_age']}  stall {1000 * metrics['stall_s']:.0f} ms"
        )


def _costs(report: StepReport) -> dict[str, float]:
    return {
        "stall_s": report.stall_s,
        "layers_written": report.layers_written,
        "bytes_written": report.bytes_written,
        "max_age": report.max_age,
        "weighted_age": report.weighted_age,
    }
