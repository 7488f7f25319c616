"""Where the differentials of a run lie: one folder for each batch, one file of each rank in it."""

from collections.abc import Iterable, Sequence

from app.baselines.lowdiff.batch_file import (
    Batch,
    BatchHeader,
    Span,
    StepData,
    decode,
    encode,
    needless,
    spans_in,
)
from layercheck.errors import DamagedShardError
from layercheck.persistence.storage import Storage


class DiffStore:
    """The folder `<run>/<method>/diffs` as one rank sees it. No collectives; any thread.

    Args:
        storage: the folder of the run.
        method: the method's folder in it.
        rank: whose files are read and written.
    """

    def __init__(self, storage: Storage, method: str, rank: int) -> None:
        self._storage = storage
        self._folder = f"{method}/diffs"
        self._rank = rank

    def spans(self) -> tuple[Span, ...]:
        """All batches of which any rank has written something."""
        return spans_in(self._storage.list(self._folder))

    def write(self, header: BatchHeader, steps: Sequence[StepData]) -> int:
        """Writes the file of this rank; durable at return. Returns its size in bytes.

        Raises:
            StorageError: nothing new is there.
        """
        chunks = encode(header, steps)
        self._storage.write(self._path(Span(steps[0].step, steps[-1].step)), chunks)
        return sum(len(memoryview(chunk).cast("B")) for chunk in chunks)

    def read(self, span: Span) -> Batch:
        """Reads and checks the file of this rank.

        Raises:
            DamagedShardError: it is missing or not what was written.
        """
        path = self._path(span)
        if self._storage.size(path) is None:
            raise DamagedShardError(f"{path} is missing", path=path)
        return decode(self._storage.read(path), span, path)

    def roll_back_to(self, step: int) -> None:
        """Deletes what lies after `step`: these steps will be taken and written again."""
        self._delete(span for span in self.spans() if span.last > step)

    def collect(self, oldest_base: int) -> None:
        """Deletes what no base needs any more."""
        self._delete(needless(oldest_base, self.spans()))

    def _delete(self, spans: Iterable[Span]) -> None:
        for span in spans:
            self._storage.delete(f"{self._folder}/{span.folder}")

    def _path(self, span: Span) -> str:
        return f"{self._folder}/{span.folder}/rank-{self._rank:05d}.diff"
