import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

from layercheck.errors import DamagedShardError
from layercheck.persistence.shard_file import (
    ShardAbout,
    ShardTensor,
    SliceMeta,
    StateScalar,
    layout,
    read_header,
)
from layercheck.persistence.storage import LocalStorage
from tests.fakes import flip_bit

ABOUT = ShardAbout(step=7, attempt=2, rank=1, world_size=2)


def meta(parameter: str, layer: str, offset: int, numel: int) -> SliceMeta:
    step = {"step": StateScalar(kind="tensor:float32", value=6.0)}
    return SliceMeta(
        parameter=parameter, layer=layer, step=7, shape=(4, 5), offset=offset, numel=numel, state=step
    )


SLICES = [meta("a.w", "layers.0", 10, 3), meta("a.b", "layers.0", 0, 0), meta("n.w", "norm", 0, 2)]
TENSORS = [
    ShardTensor(m.parameter, state, m.layer, "F32", m.numel) for m in SLICES for state in ("fp32", "exp_avg")
]


def write(root: Path) -> tuple[LocalStorage, np.ndarray]:
    storage = LocalStorage(str(root))
    made = layout(TENSORS, SLICES, ABOUT)
    data = np.arange(10, dtype=np.float32)
    storage.write("rank.safetensors", [made.header, memoryview(data)])
    assert storage.size("rank.safetensors") == made.total
    return storage, data


def test_the_safetensors_library_opens_the_file(tmp_path: Path) -> None:
    _, data = write(tmp_path)
    loaded = load_file(tmp_path / "rank.safetensors")
    assert set(loaded) == {tensor.name for tensor in TENSORS}
    np.testing.assert_array_equal(loaded["a.w/fp32"], data[:3])
    np.testing.assert_array_equal(loaded["n.w/exp_avg"], data[8:])
    assert loaded["a.b/fp32"].shape == (0,)


def test_a_layer_is_one_byte_range_and_the_data_is_aligned(tmp_path: Path) -> None:
    storage, data = write(tmp_path)
    made = layout(TENSORS, SLICES, ABOUT)
    assert len(made.header) % 64 == 0
    begin, end = made.layers["layers.0"]
    assert storage.read("rank.safetensors", begin, end) == data[:6].tobytes()
    assert made.layers["norm"] == (end, made.total)


def test_the_header_says_what_each_slice_is(tmp_path: Path) -> None:
    storage, _ = write(tmp_path)
    header = read_header(storage, "rank.safetensors")
    assert header.about == ABOUT
    assert header.slices == {m.parameter: m for m in SLICES}
    assert [(t.parameter, t.state) for t in header.of_layer("norm")] == [("n.w", "fp32"), ("n.w", "exp_avg")]
    begin, _ = layout(TENSORS, SLICES, ABOUT).layers["norm"]
    assert [t.begin for t in header.of_layer("norm")] == [begin, begin + TENSORS[-2].nbytes]


def test_scalars_of_the_state_keep_their_type(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    state = {"step": StateScalar(kind="int", value=6), "rho": StateScalar(kind="float", value=6.0)}
    slices = [SliceMeta(parameter="w", layer="l", step=7, shape=(1,), offset=0, numel=0, state=state)]
    storage.write("s", [layout([], slices, ABOUT).header])
    back = read_header(storage, "s").slices["w"].state
    assert (type(back["step"].value), type(back["rho"].value)) == (int, float)


def test_scattered_layers_are_a_mistake_of_the_caller() -> None:
    with pytest.raises(AssertionError, match="scattered"):
        layout([TENSORS[0], TENSORS[4], TENSORS[1]], SLICES, ABOUT)


@pytest.mark.parametrize("length", [0, 1, 7, 8, 40, 500, 800])
def test_i6_a_short_file_is_damage_not_a_crash(tmp_path: Path, length: int) -> None:
    storage, _ = write(tmp_path)
    path = tmp_path / "rank.safetensors"
    path.write_bytes(path.read_bytes()[:length])
    with pytest.raises(DamagedShardError):
        read_header(storage, "rank.safetensors")


def test_i6_a_missing_file_is_damage(tmp_path: Path) -> None:
    with pytest.raises(DamagedShardError, match="missing"):
        read_header(LocalStorage(str(tmp_path)), "none")


def test_i6_any_flipped_bit_of_a_header_is_found_or_changes_nothing(tmp_path: Path) -> None:
    """A wrong offset, shape or Adam step would pass every checksum of the data."""
    storage, _ = write(tmp_path)
    path = tmp_path / "rank.safetensors"
    good = read_header(storage, "rank.safetensors")
    found = 0
    bits = range(0, len(layout(TENSORS, SLICES, ABOUT).header) * 8, 3)
    for bit in bits:
        flip_bit(path, bit)
        try:
            assert read_header(storage, "rank.safetensors") == good
        except DamagedShardError:
            found += 1
        flip_bit(path, bit)
    assert found > len(bits) // 2


@settings(max_examples=60, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["__metadata__", "w/fp32", "x"]),
        st.one_of(st.none(), st.integers(), st.dictionaries(st.text(max_size=9), st.text(max_size=5))),
    )
)
def test_i6_no_header_text_crashes_the_reader(tmp_path_factory: pytest.TempPathFactory, raw: dict) -> None:
    storage = LocalStorage(str(tmp_path_factory.mktemp("h")))
    text = json.dumps(raw).encode()
    storage.write("s", [len(text).to_bytes(8, "little"), text])
    with pytest.raises(DamagedShardError):
        read_header(storage, "s")
