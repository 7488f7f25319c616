"""The data of the next step, read beside the one that computes: off the critical path, in the same order."""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol

from app.data import Batch, Dataset
from app.order import Order
from layercheck.errors import StorageError

Position = dict[str, Any]
"""Where a stream goes on, as JSON values."""


@dataclass(frozen=True, slots=True)
class Window:
    """The sequences of one step, whatever the world size.

    Attributes:
        dataset: holds them.
        indices: their numbers there, in order.
        position: where the step after it begins, None where that needs no saying.
    """

    dataset: Dataset
    indices: list[int]
    position: Position | None = None


class StepSource(Protocol):
    """What knows the sequences of a step."""

    @property
    def where(self) -> str:
        """What is read, with the setting that names it, for an error."""
        ...

    def window(self, step: int) -> Window:
        """Those of one step."""
        ...


@dataclass(frozen=True, slots=True)
class Ordered:
    """A data set in an order: any step at any time."""

    dataset: Dataset
    order: Order

    @property
    def where(self) -> str:
        """See `StepSource`."""
        return "the folder of the tokenised data (data.cache)"

    def window(self, step: int) -> Window:
        """The sequences that the order gives a step."""
        return Window(self.dataset, self.order.step_indices(step))


@dataclass(frozen=True, slots=True)
class StepData:
    """What one rank trains on in one step.

    Attributes:
        batches: its micro-batches, in order.
        num_labels: answer tokens of the global batch per micro-batch and rank.
        position: see `Window`.
    """

    batches: tuple[Batch, ...]
    num_labels: float
    position: Position | None = None


class StepLoader:
    """Reads one step ahead in a thread. What a step gets is what the source says, at any world size.

    Args:
        source: which sequences a step has.
        rank: of this process.
        world_size: number of ranks.
        micro_batch: sequences of a micro-batch.
        last_step: nothing is read beyond it.
        wait_s: longest wait for one step's data.
        pin: keep it in pinned memory, from which an accelerator copies fast.
    """

    def __init__(
        self,
        source: StepSource,
        *,
        rank: int,
        world_size: int,
        micro_batch: int,
        last_step: int,
        wait_s: float,
        pin: bool = False,
    ) -> None:
        self._source = source
        self._rank, self._world_size, self._micro_batch = rank, world_size, micro_batch
        self._last_step, self._wait_s, self._pin = last_step, wait_s, pin
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="data")
        self._ahead: tuple[int, Future[StepData]] | None = None
        self.position: Position | None = None
        """Where the step after the one last taken begins; see `Window`."""

    def take(self, step: int) -> StepData:
        """The data of a step; that of the next one begins to be read.

        Raises:
            StorageError: it did not come within `wait_s`; what the reading thread raised comes as it is.
        """
        asked = self._ahead if self._ahead is not None and self._ahead[0] == step else None
        future = asked[1] if asked is not None else self._thread.submit(self._read, step)
        try:
            data = future.result(self._wait_s)
        except TimeoutError:
            raise StorageError(
                f"the data of step {step} was not read within data.wait_s={self._wait_s:g} s: look after "
                f"{self._source.where}, or raise it",
                step=step,
            ) from None
        self._ahead, self.position = None, data.position
        if step < self._last_step:
            self._ahead = step + 1, self._thread.submit(self._read, step + 1)
        return data

    def close(self) -> None:
        """Ends the thread; a read that hangs is not waited for."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _read(self, step: int) -> StepData:
        window = self._source.window(step)
        each = len(window.indices) // self._world_size
        mine = window.indices[self._rank * each : (self._rank + 1) * each]
        parts = [mine[at : at + self._micro_batch] for at in range(0, len(mine), self._micro_batch)]
        batches = (window.dataset.batch(part) for part in parts)
        return StepData(
            tuple(batch.pinned() if self._pin else batch for batch in batches),
            window.dataset.label_count(window.indices) / (self._world_size * len(parts)),
            window.position,
        )
