import json
from pathlib import Path
from typing import Any

import pytest

from layercheck import cli
from layercheck.coordination import journal
from layercheck.persistence.shard_file import ShardAbout, ShardTensor, SliceMeta, layout
from layercheck.persistence.storage import LocalStorage
from tests.fakes import flip_bit
from tests.runs import LAYERS, Group, config, with_base


@pytest.fixture
def store(tmp_path: Path) -> LocalStorage:
    return LocalStorage(str(tmp_path / "r1" / "layercheck"))


@pytest.fixture
def run(store: LocalStorage) -> Group:
    group = with_base(store)
    group.save(6, "norm")
    group.train(9, since=4)
    group.coordinator.end_attempt(1, "completed")
    return group


def call(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    capsys.readouterr()
    code = cli.main([*arguments, "--json"])
    printed = capsys.readouterr().out
    return code, json.loads(printed) if printed else None


def test_plan_has_the_keys_of_the_contract(
    store: LocalStorage, run: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    code, plan = call(capsys, "plan", str(Path(store.root).parent))
    assert code == 0
    assert set(plan) == {
        "mode", "t_fail", "t_fail_source", "resume_step", "world_size", "max_age", "weighted_age",
        "lost_steps", "nbytes", "layers",
    }  # fmt: skip
    assert set(plan["layers"][0]) == {"name", "step", "attempt", "age", "nbytes", "files", "fallback"}
    assert [layer["step"] for layer in plan["layers"]] == [4, 4, 6]
    without = Path(store.root, plan["layers"][2]["files"][0])
    for name in (str(without), str(without.relative_to(store.root))):
        _, other = call(capsys, "plan", store.root, "--without", name)
        assert [layer["step"] for layer in other["layers"]] == [4, 4, 4]


def test_a_plan_that_does_not_exist_is_exit_code_1_and_a_wrong_store_2(
    store: LocalStorage, run: Group, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert call(capsys, "plan", store.root, "--max-age", "1")[0] == 1
    assert cli.main(["plan", str(tmp_path / "nowhere")]) == 2
    assert "holds no run" in capsys.readouterr().err
    with pytest.raises(SystemExit) as usage:
        cli.main(["plan", store.root, "--mode", "no"])
    assert usage.value.code == 2


def test_status_reads_storage_alone(
    store: LocalStorage, run: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    code, status = call(capsys, "status", store.root)
    assert code == 0
    assert (status["run"], status["step"], status["recoverable"]) == ("r1", 9, True)
    assert cli.main(["status", store.root]) == 0
    assert "run r1: attempt 1, step 9" in capsys.readouterr().out


def test_gc_tells_before_it_deletes(
    store: LocalStorage, run: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    run.write(8, 0, ("norm",))  # of the newest attempt: may still be written
    before = journal.event_folders(store)
    code, told = call(capsys, "gc", store.root, "--dry-run")
    assert code == 0
    assert journal.event_folders(store) == before
    assert [set(row) for row in told["keep"]] == [{"event", "nbytes", "reason"}] * len(told["keep"])
    assert call(capsys, "gc", store.root)[0] == 0


def test_i13_gc_refuses_while_the_state_is_in_doubt(
    store: LocalStorage, run: Group, capsys: pytest.CaptureFixture[str]
) -> None:
    run.coordinator.end_attempt(1, "failed", "step 9: the loss is not finite")
    assert cli.main(["gc", store.root]) == 1
    assert "non-finite" in capsys.readouterr().err


def true_shards(group: Group, step: int) -> None:
    """One event with real shard files, of one rank."""
    from xxhash import xxh3_128_hexdigest

    from layercheck.manifest import EventId

    event = EventId(step=step, attempt=group.attempt)
    tensors = [ShardTensor(f"{name}.w", "fp32", name, "F32", 4) for name in LAYERS]
    slices = [
        SliceMeta(parameter=f"{name}.w", layer=name, step=step, shape=(4,), offset=0, numel=4)
        for name in LAYERS
    ]
    made = layout(tensors, slices, ShardAbout(step=step, attempt=1, rank=0, world_size=1))
    group.storage.write(event.shard_file(0), [made.header, bytes(48)])
    rows = tuple(
        row.model_copy(
            update={
                "begin": made.layers[row.layer][0],
                "end": made.layers[row.layer][1],
                "xxh3_128": xxh3_128_hexdigest(bytes(16)),
            }
        )
        for row in group.rows(event, 0, LAYERS)
    )
    group.coordinator.record(event, 0, rows, group.state(step))


def test_verify_finds_a_flipped_bit_in_data_and_in_a_header(
    store: LocalStorage, capsys: pytest.CaptureFixture[str]
) -> None:
    from tests.runs import start

    group = start(store, world_size=1, **config().model_dump(exclude_defaults=True))
    true_shards(group, 0)
    code, found = call(capsys, "verify", store.root)
    assert (code, found) == (0, {"checked": 3, "nbytes": 48, "bad": []})
    path = Path(store.root, "events/step-00000000.a001/rank-00000.safetensors")
    flip_bit(path, 8 * (path.stat().st_size - 1))
    code, found = call(capsys, "verify", store.root)
    assert code == 1
    assert [(bad["layer"], bad["error"]) for bad in found["bad"]] == [("norm", "checksum does not match")]
    flip_bit(path, 8 * (path.stat().st_size - 1))
    flip_bit(path, 8 * 20)
    code, found = call(capsys, "verify", store.root)
    assert code == 1
    assert len(found["bad"]) == 3
