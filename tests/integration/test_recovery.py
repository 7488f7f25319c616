"""After a kill: the newest version of every layer, at the next step, checked byte by byte."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors import safe_open

from layercheck.errors import NoPlanError
from tests import flat, micro
from tests.fakes import flip_bit
from tests.harness import RankFailedError, run_ranks
from tests.integration.ranks import CONFIG, KILL_AT, STEPS, open_session, train


def _events(storage: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for commit in sorted(Path(storage, "run/layercheck/events").glob("*/commit.parquet")):
        rows += pq.read_table(commit).to_pylist()
    return rows


def _newest(storage: str) -> dict[str, int]:
    newest: dict[str, int] = {}
    for row in _events(storage):
        newest[row["layer"]] = max(newest.get(row["layer"], -1), row["step"])
    return newest


def _resume_and_look(storage: str, seed: int = 99) -> dict[str, Any]:
    """Recovers, and gives the receipt and the live state of this rank as (offset, values) by tensor."""
    engine = micro.build(seed)
    session = open_session(engine, storage)
    point = session.resume()
    zero3 = session._zero3
    state = {
        f"{part.spec.name}/{key}": (part.offset, tensor.clone().numpy())
        for parts in zero3.slices.values()
        for part in parts
        for key, tensor in zero3.tensors(part).items()
    }
    adam = {name: zero3.scalars(parts[0])["step"]["value"] for name, parts in zero3.slices.items()}
    session.close("failed")
    return {"step": point.step, "receipt": point.receipt.model_dump(), "state": state, "adam": adam}


@pytest.fixture
def killed(killed_once: Path, tmp_path: Path) -> str:
    """A copy of that store, to be recovered or damaged."""
    shutil.copytree(killed_once, tmp_path / "store")
    return str(tmp_path / "store")


def test_recovery_composes_the_newest_committed_version_of_every_layer(killed: str, tmp_path: Path) -> None:
    newest = _newest(killed)
    results = run_ranks(2, tmp_path, _resume_and_look, killed)
    receipt = results[0]["receipt"]
    assert receipt["mode"] == "composite"
    assert receipt["t_fail"] <= KILL_AT
    assert receipt["t_fail"] >= max(newest.values())
    assert results[0]["step"] == receipt["resume_step"] == receipt["t_fail"] + 1
    assert {layer["name"]: layer["step"] for layer in receipt["layers"]} == newest
    assert {layer["name"]: layer["age"] for layer in receipt["layers"]} == {
        name: receipt["t_fail"] - step for name, step in newest.items()
    }
    assert len(set(newest.values())) >= 3, "a composite of equal ages shows nothing"
    for name, step in newest.items():
        assert all(result["adam"][name] == step for result in results), "each layer has its own Adam step"
    _assert_state_is_that_of_the_files(killed, newest, [result["state"] for result in results])


def _resume_after_a_wait(storage: str) -> dict[str, Any]:
    """Recovers where the coordinator says that it watched another submission for a thousand seconds."""
    session = open_session(micro.build(99), storage)
    begin = session._coordinator.begin_attempt
    session._coordinator.begin_attempt = lambda *args: replace(begin(*args), wait_s=1000.0)
    receipt = session.resume().receipt.model_dump()
    session.close("failed")
    return receipt


def test_a_wait_for_another_submission_is_no_part_of_the_plan(killed: str, tmp_path: Path) -> None:
    receipt = run_ranks(2, tmp_path, _resume_after_a_wait, killed)[0]
    assert (receipt["wait_s"], receipt["plan_s"]) == (1000.0, 0.0)
    assert receipt["fetch_s"] > 0


def _assert_state_is_that_of_the_files(storage: str, newest: dict[str, int], states: list[Any]) -> None:
    layer_of = {}
    for row in _events(storage):
        if row["step"] == newest[row["layer"]]:
            layer_of[row["layer"], row["rank"]] = Path(storage, "run/layercheck", row["file"])
    saved: dict[str, list[np.ndarray]] = {}
    for rank in (0, 1):
        for layer in newest:
            with safe_open(layer_of[layer, rank], "np") as shard:
                for name in shard.keys():  # noqa: SIM118 (not a dict)
                    if f'"layer":"{layer}"' in shard.metadata()[name.rpartition("/")[0]]:
                        saved.setdefault(name, []).append(shard.get_tensor(name))
    assert set(saved) == set(states[0])
    for name, parts in saved.items():
        live = np.concatenate([state[name][1] for state in states])
        np.testing.assert_array_equal(live, np.concatenate(parts), err_msg=name)


def _first_update(storage: str) -> dict[str, Any]:
    """Recovers, takes one step, and gives what the optimizer saw and did, sub-group by sub-group."""
    engine = micro.build(99)
    session = open_session(engine, storage)
    point = session.resume()
    zero3, seen = session._zero3, []

    def look(group: Any) -> dict[str, np.ndarray]:
        state = zero3._state(group.index)
        tensors = {"weight": group.flat, "m": state["exp_avg"], "v": state["exp_avg_sq"]}
        return {
            key: np.concatenate([t.detach().double().numpy()[b : b + n] for b, n in group.segments])
            for key, t in tensors.items()
        }

    def before(group: Any, lr: float) -> None:
        gradient = engine.optimizer.fp32_partitioned_groups_flat[group.index].grad.double().numpy()
        found = look(group) | {"g": np.concatenate([gradient[b : b + n] for b, n in group.segments])}
        # Inside a call the list may hold that one group alone, see `updates.py`.
        settings = next(each for each in engine.optimizer.optimizer.param_groups if each["params"])
        facts = {key: settings[key] for key in ("betas", "eps", "weight_decay")}
        seen.append({"layer": group.layer, "lr": lr, "before": found, **facts})

    def after(group: Any) -> None:
        seen[-1]["after"] = look(group)["weight"]

    stop = zero3.on_update(before, after)
    micro.train_step(engine, point.step)
    stop()
    tied = engine.module.lm_head.weight is engine.module.model.embed_tokens.weight
    session.close("failed")
    steps = {layer["name"]: layer["step"] for layer in point.receipt.layers}
    return {"seen": seen, "steps": steps, "tied": tied}


def test_the_first_update_of_each_layer_is_adams_with_the_layers_own_step(
    killed: str, tmp_path: Path
) -> None:
    for result in run_ranks(2, tmp_path, _first_update, killed):
        assert len(set(result["steps"].values())) >= 3
        assert result["tied"], "the head that shares the embedding is still one tensor with it"
        assert {one["layer"] for one in result["seen"]} == set(result["steps"])
        for one in result["seen"]:
            updated = _adamw(one, result["steps"][one["layer"]] + 1)
            assert np.abs(one["before"]["g"]).max(initial=0) > 0
            np.testing.assert_allclose(one["after"], updated, rtol=3e-7, atol=2e-8, err_msg=one["layer"])


def _adamw(seen: dict[str, Any], step: int) -> np.ndarray:
    """Loshchilov & Hutter, with the bias correction of this layer's step."""
    (b1, b2), before = seen["betas"], seen["before"]
    m = b1 * before["m"] + (1 - b1) * before["g"]
    v = b2 * before["v"] + (1 - b2) * before["g"] ** 2
    decayed = before["weight"] * (1 - seen["lr"] * seen["weight_decay"])
    return decayed - seen["lr"] * (m / (1 - b1**step)) / (np.sqrt(v / (1 - b2**step)) + seen["eps"])


def test_i6_a_flipped_bit_costs_one_layer_an_older_version_and_is_said_out_loud(
    killed: str, tmp_path: Path
) -> None:
    newest = _newest(killed)
    row = next(
        row for row in _events(killed) if row["layer"] == "layers.1" and row["step"] == newest["layers.1"]
    )
    file = Path(killed, "run/layercheck", row["file"])
    content = bytearray(file.read_bytes())
    content[(row["begin"] + row["end"]) // 2] ^= 1
    file.write_bytes(content)
    receipt = run_ranks(2, tmp_path, _resume_and_look, killed)[0]["receipt"]
    by_name = {layer["name"]: layer for layer in receipt["layers"]}
    assert by_name["layers.1"]["fallback"]
    assert by_name["layers.1"]["step"] < newest["layers.1"]
    assert [(bad["file"], bad["layer"]) for bad in receipt["bad"]] == [(row["file"], "layers.1")]
    assert {n: layer["step"] for n, layer in by_name.items() if n != "layers.1"} == {
        n: step for n, step in newest.items() if n != "layers.1"
    }


def test_recovery_goes_on_to_the_end_and_the_next_kill_recovers_too(killed: str, tmp_path: Path) -> None:
    second = run_ranks(2, tmp_path, partial(train, kill_at=STEPS), killed, STEPS + 10)
    assert second == [None, None]
    result = run_ranks(2, tmp_path, train, killed, STEPS + 10)[0]
    assert result["receipt"]["t_fail"] > KILL_AT
    assert max(result["losses"]) == STEPS + 10
    assert max(report.max_age for report in result["reports"].values()) <= CONFIG["s_max"]


def _other_model(storage: str) -> None:
    open_session(micro.build(tied=False), storage).resume()


def test_i7_a_store_of_another_model_is_refused_naming_the_first_difference(
    killed: str, tmp_path: Path
) -> None:
    before = sorted(str(path) for path in Path(killed).rglob("*"))
    with pytest.raises(RankFailedError, match=r"StoreMismatchError.*lm_head"):
        run_ranks(2, tmp_path, _other_model, killed)
    assert sorted(str(path) for path in Path(killed).rglob("*")) == before


def test_i7_a_store_without_commits_never_starts_from_zero(killed: str, tmp_path: Path) -> None:
    for commit in Path(killed, "run/layercheck/events").glob("*/commit.parquet"):
        commit.unlink()
    with pytest.raises(RankFailedError, match=r"NoPlanError.*embed_tokens"):
        run_ranks(2, tmp_path, _resume_and_look, killed)


def _refused(storage: str) -> tuple[str, bool]:
    engine = micro.build(99)
    before = flat.parts_of(engine)
    with pytest.raises(NoPlanError) as caught:
        open_session(engine, storage).resume()
    after = flat.parts_of(engine)
    return str(caught.value), all(np.array_equal(before[key], after[key]) for key in before | after)


def test_a_recovery_that_fails_half_way_leaves_the_engine_as_it_was(killed: str, tmp_path: Path) -> None:
    for row in _events(killed):
        if row["layer"] == "layers.2" and row["rank"] == 1:
            flip_bit(Path(killed, "run/layercheck", row["file"]), 8 * row["begin"])
    for message, unchanged in run_ranks(2, tmp_path, _refused, killed):
        assert "no usable version of layers.2" in message
        assert unchanged, "the other layers had been fetched when the last version of this one proved bad"
