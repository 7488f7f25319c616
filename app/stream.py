"""Data that is read while the run goes: the rows of an IterableDataset, packed step by step, nothing on disk.

A step puts the documents that follow into sequences of its own and ends before the first that none has room
for. So there is no half-filled sequence to be saved: the position of one row, which rides in the trainer
state, says where the next step begins. Every rank reads all rows and takes its part of the step, whatever the
world size is.
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from app.config import Config, DataConfig
from app.data import data_folder, from_every_rank, from_rank_0, in_memory
from app.loader import Position, Window
from app.packing import Packed, fullest
from app.sources import iterable_rows, read_row, reader_of, seen_of_stream, stream_fingerprint
from app.tokens import Counts, Document, cut, load_tokenizer, tokenised
from layercheck.errors import ConfigError

log = logging.getLogger("app")
_ROWS_PER_CALL = 64


@dataclass(frozen=True, slots=True)
class Place:
    """A row of the source: before it, `row` rows of this epoch were read.

    `rows` is the IterableDataset's own state there, None at the beginning of an epoch.
    """

    epoch: int = 0
    row: int = 0
    rows: dict[str, Any] | None = None


class Stream:
    """An endless sequence over epochs, each in the order of the source. `seek` first, then step after step.

    Args:
        config: of the run.
        tokenizer: with a chat template.
        rows: makes an IterableDataset of the source's rows, at their beginning.
    """

    def __init__(self, config: Config, tokenizer: Any, rows: Callable[[], Any]) -> None:
        self.tokenizer = tokenizer
        self._config = config
        self._open = rows
        self._source = stream_fingerprint(config.data)
        self._counts = Counts()
        self._next_step = 0
        self._documents: Iterator[tuple[Place, Document]] = iter(())
        self._first: tuple[Place, Document] | None = None
        """What the next step begins with, as far as it was read already."""

    @property
    def where(self) -> str:
        """See `StepSource`."""
        return f"data.source={self._config.data.source!r}, which is read while the run goes"

    @property
    def counts(self) -> dict[str, int]:
        """What happened to the conversations that were read since `seek`."""
        return asdict(self._counts)

    def seek(self, step: int, position: Position | None) -> None:
        """Goes to where a step begins.

        Args:
            step: the first that will be asked for.
            position: of the trainer state before it; None to begin with the first row.
        """
        place = Place()
        if position is not None and position["source"] == self._source:
            place = Place(position["epoch"], position["row"], position["rows"])
        elif step > 1:
            log.warning(
                "step %d: the trainer state names no place in data.source=%r: it is read from its first row",
                step,
                self._config.data.source,
            )
        self._next_step, self._first, self._counts = step, None, Counts()
        self._documents = self._read(place)

    def window(self, step: int) -> Window:
        """The sequences of a step; every step once, in turn.

        Raises:
            ConfigError: a row does not follow the schema, or no row has an answer within `seq_len`.
        """
        assert step == self._next_step, f"step {step} is asked for, the stream is at {self._next_step}"
        data, batch = self._config.data, self._config.train.global_batch
        sequences: list[Packed] = []
        while True:
            place, document = self._first or next(self._documents)
            room = fullest(sequences, document, data.seq_len) if data.packing else None
            if room is None and len(sequences) == batch:
                self._first, self._next_step = (place, document), step + 1
                made = in_memory(sequences, data.seq_len, self.tokenizer)
                return Window(made, list(range(batch)), {"source": self._source, **asdict(place)})
            if room is None:
                room = Packed()
                sequences.append(room)
            room.add(document)
            self._first = None

    def _read(self, place: Place) -> Iterator[tuple[Place, Document]]:
        """Tokenised conversations with the place of each, for ever; the tokenizer gets several at once."""
        data, talks = self._config.data, self._talks(place)
        fruitful = place.epoch - (place.row == 0)
        while some := list(islice(talks, _ROWS_PER_CALL)):
            texts = tokenised([talk for _, talk in some], self.tokenizer)
            for (found, _), document in zip(some, texts, strict=True):
                kept = cut(document, data.seq_len, self._counts)
                if kept is not None:
                    fruitful = found.epoch
                    yield found, kept
                elif found.epoch > fruitful + 1:
                    raise ConfigError(
                        f"data.source={data.source!r}: no conversation of a whole epoch has an answer within "
                        f"data.seq_len={data.seq_len} tokens: raise data.seq_len, or see whether "
                        "model.chat_template writes answers behind its prompt"
                    )

    def _talks(self, place: Place) -> Iterator[tuple[Place, Any]]:
        """Conversations with the place of each, epoch after epoch."""
        data, read = self._config.data, reader_of(self._config.data)
        rows = self._open()
        beginning = rows.state_dict()
        while True:
            rows.load_state_dict(place.rows or beginning)
            following = iter(rows)
            while data.max_rows is None or place.row < data.max_rows:
                row = self._next_row(following, place)
                if row is None:
                    break
                yield place, read_row(data, read, place.row + 1, row)
                place = Place(place.epoch, place.row + 1, rows.state_dict())
            if place.row == 0:
                raise ConfigError(f"data.source={data.source!r} holds no row")
            place = Place(place.epoch + 1)

    def _next_row(self, rows: Iterator[dict[str, Any]], place: Place) -> dict[str, Any] | None:
        from datasets.exceptions import DatasetsError

        try:
            return next(rows, None)
        except (ValueError, DatasetsError) as error:  # pyarrow's too; a network that fails is for a restart
            raise ConfigError(
                f"data.source={self._config.data.source!r} cannot be read behind row {place.row}: {error}"
            ) from error


def open_stream(config: Config, rank: int = 0) -> Stream:
    """The stream of a run; rank 0 looks at its source first and builds the bundled tokenizer.

    Raises:
        ConfigError: the source or the tokenizer cannot be used, or ranks see different sources; the same
            error on every rank.
    """
    from_rank_0(lambda: _prepare(config), rank, config.data.wait_s)
    _check_all_see_the_same(config.data, from_every_rank(seen_of_stream(config.data), config.data.wait_s))
    tokenizer = load_tokenizer(config, config.data_folder)
    if rank == 0:
        log.info("data: %s is read while the run goes", config.data.source)
    return Stream(config, tokenizer, lambda: iterable_rows(config.data))


def _check_all_see_the_same(data: DataConfig, seen: list[str]) -> None:
    """Every rank reads the rows itself and takes its part: of different rows none would be a batch."""
    for rank, found in enumerate(seen):
        if found != seen[0]:
            raise ConfigError(
                f"data.source={data.source!r}: rank {rank} sees {found}, and rank 0 {seen[0]}: each reads "
                "the stream itself, so give all nodes the same (a shared folder, or equal copies)",
                rank=rank,
            )


def _prepare(config: Config) -> None:
    reader_of(config.data)
    load_tokenizer(config, data_folder(config) if config.keeps_data else config.data_folder)
