"""One rank's file of one event: the safetensors layout, written and read without torch.

A file is `<8 bytes: header length><JSON header><data>`. Tensors are 1-D slices named `<parameter>/fp32`,
`<parameter>/exp_avg`, ..., those of a residual `<parameter>/residual` and `<parameter>/residual_scale`; all
tensors of a layer lie together, so a layer is one byte range. The header's `__metadata__` (strings only, by
the format) holds one JSON text for each parameter and one, `layercheck`, for the file. The checksums in a
commit cover the data of each layer; `digest` inside `layercheck` covers the header, since a wrong offset or
Adam step is as bad as a wrong weight (I6).
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from xxhash import xxh3_128_hexdigest

from layercheck.errors import DamagedShardError
from layercheck.persistence.storage import Readable

DTYPE_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U8": 1, "BOOL": 1,
}  # fmt: skip
"""safetensors dtype -> bytes of an element."""

MASTER = "fp32"
"""Tensor of the weights that the optimizer updates."""
RESIDUAL, SCALE = "residual", "residual_scale"
"""Tensors of a residual: codes, I8 or (two in a byte) U8, and a BF16 scale for each block of values."""

_ALIGNMENT = 64
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library


class StateScalar(BaseModel):
    """A scalar of the optimizer state, such as the Adam step, with the type it must get back."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: str
    """`int`, `float`, or `tensor:<dtype>` as torch names it (`tensor:float32`)."""
    value: int | float


class ResidualMeta(BaseModel):
    """How the values of a residual are coded, and the version that they add to."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    bits: Literal[4, 8]
    block: int = Field(ge=2, multiple_of=2)
    base_step: int = Field(ge=0)
    base_attempt: int = Field(ge=1)


class SliceMeta(BaseModel):
    """What one rank holds of one parameter. `state` is the scalar state of its sub-group."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameter: str
    layer: str
    step: int = Field(ge=0)
    shape: tuple[int, ...]
    offset: int = Field(ge=0)
    numel: int = Field(ge=0)
    state: dict[str, StateScalar] = {}
    residual: ResidualMeta | None = None
    """None in a version; such a header has no such key."""


class RngState(BaseModel):
    """The random number generators of one rank; words and states as base64 of zlib (`recovery/rng.py`)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    torch: str
    cuda: str | None = None
    python: str
    python_version: int
    python_gauss: float | None = None
    numpy: str
    numpy_position: int
    numpy_gauss: float | None = None


class ShardAbout(BaseModel):
    """What the file as a whole is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    format: Literal[1] = 1
    step: int = Field(ge=0)
    attempt: int = Field(ge=1)
    part: int = Field(0, ge=0)
    rank: int = Field(ge=0)
    world_size: int = Field(ge=1)
    rng: RngState | None = None
    """After the step of this file, in runs that ask for it; a file without it has no such key."""

    def facts(self) -> dict[str, Any]:
        """What the header says of the file, without its digest."""
        return self.model_dump(exclude_none=True)


@dataclass(frozen=True, slots=True)
class ShardTensor:
    """One tensor to be written: `parameter`/`state` is its name, `numel` its length."""

    parameter: str
    state: str
    layer: str
    dtype: str
    numel: int

    @property
    def name(self) -> str:
        """Name in the file."""
        return f"{self.parameter}/{self.state}"

    @property
    def nbytes(self) -> int:
        """Size in the file."""
        return self.numel * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """Where everything will lie. All offsets count from the start of the file.

    Attributes:
        header: the first bytes of the file, length field and padding included; the data begins at
            `len(header)`, a multiple of 64.
        layers: layer -> byte range of its tensors.
        total: size of the file.
    """

    header: bytes
    layers: dict[str, tuple[int, int]]
    total: int


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor as a file's header describes it; `begin` and `end` count from the start of the file."""

    parameter: str
    state: str
    dtype: str
    numel: int
    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class ShardHeader:
    """A checked header. `tensors` in file order; `slices` by parameter."""

    about: ShardAbout
    slices: dict[str, SliceMeta]
    tensors: tuple[TensorRange, ...]

    def of_layer(self, layer: str) -> tuple[TensorRange, ...]:
        """The tensors of one layer."""
        return tuple(tensor for tensor in self.tensors if self.slices[tensor.parameter].layer == layer)


def layout(tensors: Sequence[ShardTensor], slices: Sequence[SliceMeta], about: ShardAbout) -> ShardLayout:
    """Places tensors one after another, in the order given; all of one layer must follow each other."""
    metadata = {
        meta.parameter: meta.model_dump_json(exclude={"parameter"}, exclude_none=True) for meta in slices
    }
    assert len(metadata) == len(slices), "two slices of one parameter in one file"
    assert "layercheck" not in metadata, "a parameter named 'layercheck'"
    entries: dict[str, Any] = {}
    ends: list[int] = [0]
    for tensor in tensors:
        assert tensor.parameter in metadata, f"tensor {tensor.name} has no slice"
        assert tensor.name not in entries, f"tensor {tensor.name} comes twice"
        ends.append(ends[-1] + tensor.nbytes)
        entries[tensor.name] = {"dtype": tensor.dtype, "shape": [tensor.numel], "data_offsets": ends[-2:]}
    header = _header(entries, metadata, about)
    start = len(header)
    return ShardLayout(
        header=header,
        layers=_layer_ranges(tensors, start),
        total=start + ends[-1],
    )


def _layer_ranges(tensors: Sequence[ShardTensor], position: int) -> dict[str, tuple[int, int]]:
    ranges: dict[str, tuple[int, int]] = {}
    last = None
    for tensor in tensors:
        assert tensor.layer == last or tensor.layer not in ranges, f"layer {tensor.layer} is scattered"
        begin, _ = ranges.get(tensor.layer, (position, position))
        position += tensor.nbytes
        ranges[tensor.layer] = (begin, position)
        last = tensor.layer
    return ranges


def _header(entries: dict[str, Any], metadata: dict[str, str], about: ShardAbout) -> bytes:
    file_facts = about.facts() | {"digest": _digest(entries, metadata, about)}
    texts = {"layercheck": json.dumps(file_facts)} | metadata
    text = json.dumps({"__metadata__": texts} | entries, separators=(",", ":")).encode("ascii")
    text += b" " * (-(_LENGTH_BYTES + len(text)) % _ALIGNMENT)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text


def _digest(entries: dict[str, Any], metadata: dict[str, str], about: ShardAbout) -> str:
    """Over everything in the header but the digest itself, whatever the order of the keys."""
    value = [
        entries,
        {key: text for key, text in metadata.items() if key != "layercheck"},
        about.facts(),
    ]
    return xxh3_128_hexdigest(json.dumps(value, sort_keys=True, separators=(",", ":")).encode("ascii"))


def read_header(storage: Readable, path: str) -> ShardHeader:
    """Reads and checks the header of a shard file; no length or offset in it is trusted.

    Raises:
        DamagedShardError: the file is missing, short, or its header does not have its own digest.
    """
    size = storage.size(path)
    if size is None:
        raise DamagedShardError(f"{path} is missing", path=path)
    return header_of(path, size, lambda begin, end: storage.read(path, begin, end))


def header_of(name: str, size: int, read: Callable[[int, int], bytes]) -> ShardHeader:
    """The same for `size` bytes that lie anywhere: `read(begin, end)` gives some of them.

    Raises:
        DamagedShardError: as `read_header`; names them by `name`.
    """
    length = int.from_bytes(read(0, _LENGTH_BYTES), "little") if size >= _LENGTH_BYTES else -1
    if not 0 < length <= min(size - _LENGTH_BYTES, _MAX_HEADER_BYTES):
        raise DamagedShardError(f"{name}: header length {length} in a file of {size} bytes", path=name)
    start = _LENGTH_BYTES + length
    try:
        return _parse(json.loads(read(_LENGTH_BYTES, start)), start, size)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, ValidationError) as error:
        raise DamagedShardError(f"{name}: damaged header: {error}", path=name) from error


def _parse(raw: dict[str, Any], start: int, size: int) -> ShardHeader:
    metadata: dict[str, str] = raw.pop("__metadata__")
    facts: dict[str, Any] = json.loads(metadata["layercheck"])
    digest = facts.pop("digest")
    about = ShardAbout.model_validate(facts)
    if digest != _digest(raw, metadata, about):
        raise ValueError("the digest does not match")
    slices = {
        name: SliceMeta.model_validate(json.loads(text) | {"parameter": name})
        for name, text in metadata.items()
        if name != "layercheck"
    }
    tensors = [_tensor(name, entry, start, size) for name, entry in raw.items()]
    for tensor in tensors:
        if tensor.parameter not in slices:
            raise ValueError(f"tensor {tensor.parameter}/{tensor.state} has no slice")
    tensors.sort(key=lambda tensor: (tensor.begin, tensor.end))
    # A flipped bit of the length field may still cut the text inside its padding and so shift all data.
    if (tensors[-1].end if tensors else start) != size:
        raise ValueError(f"the tensors do not end with the file at {size}")
    return ShardHeader(about, slices, tuple(tensors))


def _tensor(name: str, entry: dict[str, Any], start: int, size: int) -> TensorRange:
    parameter, _, state = name.rpartition("/")
    (numel,) = entry["shape"]
    begin, end = entry["data_offsets"]
    if not 0 <= begin <= end <= size - start:
        raise ValueError(f"tensor {name} lies at {begin}..{end} of {size - start} data bytes")
    if end - begin != numel * DTYPE_BYTES[entry["dtype"]]:
        raise ValueError(f"tensor {name}: {numel} x {entry['dtype']} in {end - begin} bytes")
    return TensorRange(parameter, state, entry["dtype"], numel, start + begin, start + end)
