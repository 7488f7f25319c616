"""The bytes of a shard file on their way, with the checksums that its rows will name."""

from collections.abc import Iterable, Iterator

import xxhash

from layercheck.errors import StorageError
from layercheck.persistence.shard_file import ShardLayout


class HashedBytes:
    """The bytes of a shard file, hashed as they pass: one digest per layer, known at the end."""

    def __init__(self, shard: ShardLayout, data: Iterable[memoryview]) -> None:
        self._shard = shard
        self._data = data
        self.digests: dict[str, str] = {}

    @property
    def nbytes(self) -> int:
        """Size of the file."""
        return self._shard.total

    def __iter__(self) -> Iterator[bytes | memoryview]:
        shard = self._shard
        hashers = {layer: xxhash.xxh3_128() for layer in shard.layers}
        pending = list(shard.layers.items())
        yield shard.header
        position = len(shard.header)
        for chunk in self._data:
            end = position + len(chunk)
            for layer, (begin, stop) in pending:
                if begin < end and stop > position:
                    hashers[layer].update(chunk[max(begin - position, 0) : stop - position])
            pending = [item for item in pending if item[1][1] > end]
            yield chunk
            position = end
        if position != shard.total:
            raise StorageError(f"a snapshot has {position} bytes, its header says {shard.total}")
        self.digests = {layer: hasher.hexdigest() for layer, hasher in hashers.items()}
