"""`frozen: source`: a store that holds only hashes of what does not train (I11)."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import xxhash

from layercheck.cli import main
from layercheck.config import parse_config
from layercheck.coordination import journal
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.status import summarize
from layercheck.errors import ConfigError, LayerCheckError, StoreMismatchError
from layercheck.manifest import RunRecord
from layercheck.persistence.storage import LocalStorage
from layercheck.recovery import frozen, install
from layercheck.tracking.ledger import Ledger
from layercheck.zero3 import FROZEN as WEIGHT
from tests.runs import LAYERS, Group, config, coordinator, layer_map, plan_of, run_record, start, steps

FROZEN = ("lm_head.frozen", "adapters.frozen")


def record(**hashes: str) -> RunRecord:
    found = {"lm_head.frozen": "aa", "adapters.frozen": "bb"} | hashes
    return run_record(frozen=FROZEN).model_copy(update={"frozen_hashes": found})


def trained(root: Path) -> LocalStorage:
    """A run of step 9 whose frozen layers were never written."""
    storage = LocalStorage(str(root))
    made = coordinator(storage)
    storage.write("probe", [b"x"])
    assert made.open_run(record(), "probe") == ()
    group = Group(made, storage, made.begin_attempt("t1", "s1", 2, "composite"))
    for step in (0, 2, 4, 6, 8):
        group.save(step)
    group.train(9)
    made.close()
    return storage


@pytest.mark.parametrize("mode", ["composite", "uniform"])
def test_i11_a_plan_and_a_status_do_without_the_layers_that_come_from_their_source(
    tmp_path: Path, mode: str
) -> None:
    facts = journal.load_facts(trained(tmp_path))
    made = make_plan(facts, PlanRequest(mode=mode))
    assert made is not None
    assert steps(made) == dict.fromkeys(LAYERS, 8)
    status = summarize(facts)
    assert status["recoverable"]
    assert [layer["name"] for layer in status["layers"]] == list(LAYERS)


def test_i11_the_next_life_has_to_bring_the_same_frozen_weights(tmp_path: Path) -> None:
    storage = trained(tmp_path)
    made = coordinator(storage)
    with pytest.raises(StoreMismatchError, match=r"layer adapters\.frozen has other weights .*cc, not bb"):
        made.open_run(record(**{"adapters.frozen": "cc"}), "probe")
    with pytest.raises(StoreMismatchError, match="frozen='source', not 'base'"):
        made.open_run(run_record(frozen=FROZEN), "probe")
    assert made.open_run(record(), "probe") == ()
    assert steps(plan_of(start(storage, made, "t2"))) == dict.fromkeys(LAYERS, 8)
    made.close()


def test_i11_a_store_with_frozen_layers_does_not_turn_to_hashes(tmp_path: Path) -> None:
    storage = LocalStorage(str(tmp_path))
    made = coordinator(storage)
    storage.write("probe", [b"x"])
    made.open_run(run_record(frozen=FROZEN), "probe")
    with pytest.raises(StoreMismatchError, match="frozen='base', not 'source'"):
        made.open_run(record(), "probe")


@pytest.mark.parametrize(("frozen", "due"), [("base", FROZEN), ("source", ())])
def test_i11_a_full_event_owes_frozen_layers_only_where_they_are_kept(
    frozen: str, due: tuple[str, ...]
) -> None:
    ledger = Ledger.fresh(layer_map(FROZEN), config(frozen=frozen))
    assert ledger.facts(0, 0.0).frozen == due
    assert ledger.full_set == LAYERS + due


def test_an_install_needs_the_layers_that_train_and_those_that_are_kept(tmp_path: Path) -> None:
    class Engine:
        layer_map = layer_map(FROZEN)
        begun = 0

        def begin_install(self) -> None:
            self.begun += 1

    engine: Any = Engine()
    made = make_plan(journal.load_facts(trained(tmp_path)), PlanRequest())
    assert made is not None
    install.start(engine, made, "source")
    with pytest.raises(LayerCheckError, match=r"no layer lm_head\.frozen"):
        install.start(engine, made, "base")
    assert engine.begun == 1
    without = made.model_copy(update={"layers": made.layers[1:]})
    with pytest.raises(LayerCheckError, match="no layer embed_tokens"):
        install.start(engine, without, "source")


@pytest.mark.parametrize("form", ["hf", "deepspeed"])
def test_a_store_of_hashes_is_not_exported(
    tmp_path: Path, form: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(tmp_path / "r1" / "layercheck")
    assert main(["export", str(tmp_path / "r1"), "--to", form, "--out", str(tmp_path / "out")]) == 2
    assert "layer lm_head.frozen the store of r1 holds a hash alone" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_another_word_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"frozen='hash'"):
        parse_config({"frozen": "hash"})


class _Zero3:
    """Two frozen layers of two bf16 parameters each, and one that trains, on one rank."""

    rank, world_size, collective_device = 0, 1, torch.device("cpu")

    def __init__(self, broken: str = "") -> None:
        names = {"a.frozen": False, "b": True, "b.frozen": False}
        layers = [SimpleNamespace(name=name, trainable=trains) for name, trains in names.items()]
        self.layer_map = SimpleNamespace(layers=layers)
        self.slices = {layer.name: [self._part(layer.name, n) for n in (5, 2)] for layer in layers}
        self.broken, self.looks = broken, 0

    def _part(self, layer: str, numel: int) -> Any:
        return SimpleNamespace(
            layer=layer, numel=numel, spec=SimpleNamespace(name=f"{layer}/{numel}", numel=numel)
        )

    def tensors(self, part: Any) -> dict[str, Any]:
        self.looks += 1
        if part.layer == self.broken and self.looks > 4:  # the first four say how much room there must be
            raise OSError("bad address")
        return {WEIGHT: torch.arange(part.numel, dtype=torch.bfloat16) + len(part.layer)}


@pytest.fixture
def gathers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Collectives of a group of one; sizes of what was gathered."""
    seen: list[int] = []

    def gather(sent: Any, parts: Any, dst: int) -> None:
        seen.append(sent.numel())
        parts[dst].copy_(sent)

    group = SimpleNamespace(gather=gather, all_gather_object=lambda every, mine: every.__setitem__(0, mine))
    monkeypatch.setattr(frozen, "dist", group)
    monkeypatch.setattr(frozen, "count_over_ranks", lambda count, device: count)
    return seen


def test_i11_a_frozen_layer_is_hashed_whole_and_somebody_is_told(
    gathers: list[int], caplog: pytest.LogCaptureFixture
) -> None:
    engine: Any = _Zero3()
    with caplog.at_level("INFO", frozen.__name__):
        found = frozen.frozen_hashes(engine)
    assert list(found) == ["a.frozen", "b.frozen"]
    parts = [engine.tensors(part)[WEIGHT].view(torch.uint8) for part in engine.slices["a.frozen"]]
    assert found["a.frozen"] == xxhash.xxh3_128_hexdigest(torch.cat(parts).numpy().data)
    assert gathers == [10, 4, 10, 4]
    assert [line.split(" in ")[0] for line in caplog.messages] == [
        "frozen='source': hashing 2 frozen layers, 0.00 GB", "frozen='source': hashed"
    ]  # fmt: skip


def test_a_rank_that_cannot_read_a_frozen_layer_leaves_with_the_others(gathers: list[int]) -> None:
    with pytest.raises(
        LayerCheckError, match=r"rank 0 cannot hash the frozen layer a\.frozen: bad"
    ) as caught:
        frozen.frozen_hashes(_Zero3("a.frozen"))  # type: ignore[arg-type]
    assert isinstance(caught.value.__cause__, OSError)
    assert gathers == [10, 4], "it took part in all gathers of the layer"


def test_the_others_leave_too(gathers: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    counts = iter([0, 0, 1])  # of the room, and of the two layers
    monkeypatch.setattr(frozen, "count_over_ranks", lambda count, device: next(counts))
    with pytest.raises(
        LayerCheckError, match=r"another rank cannot hash the frozen layer b\.frozen: see its"
    ):
        frozen.frozen_hashes(_Zero3())  # type: ignore[arg-type]
    assert len(gathers) == 4
