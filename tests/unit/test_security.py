"""A store is data, never code, and nothing in it leads out of it. What it tells is no secret."""

import ast
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from layercheck.config import LayerCheckConfig
from layercheck.coordination import commit_file, journal
from layercheck.coordination.audit import audit
from layercheck.coordination.plan import PlanRequest, make_plan
from layercheck.coordination.protocol import AttemptGrant
from layercheck.manifest import BadShard, Commit, RunRecord, ShardRecord
from layercheck.recovery.fetch import Fetcher
from tests.conftest import ROOT
from tests.crash.lives import Wanted
from tests.runs import layer_map
from tests.shards import plan_of, shelf
from tests.stores import RANKS, RealRun, real_run

RUNS_CODE = {"cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal", "jsonpickle"}
UNPICKLES = {"load", "loads", "Unpickler", "_Unpickler"}
"""Of `pickle` itself: the export writes DeepSpeed's format with it, and reads nothing."""
LOADS_CODE = {
    "torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load", "eval", "exec",
    "pd.read_pickle", "torch.jit.load", "torch.package.PackageImporter",
}  # fmt: skip
SECRET = "hunter2-hunter2"


@pytest.fixture
def run(tmp_path: Path) -> RealRun:
    return real_run(tmp_path / "r1")


# ---------------------------------------------------------------- data, not code


def sources() -> list[Path]:
    folders = ("layercheck", "cluster", "app", "simulations")
    return [path for folder in folders for path in (ROOT / folder).rglob("*.py")]


def dangers(code: str) -> list[str]:
    """Imports and calls that could run what they read."""
    found = []
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names if alias.name.split(".")[0] in RUNS_CODE]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in RUNS_CODE:
            found.append(str(node.module))
        elif isinstance(node, ast.ImportFrom) and node.module == "pickle":
            found += [alias.name for alias in node.names if alias.name in UNPICKLES]
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "pickle":
            found += [node.attr] if node.attr in UNPICKLES else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in LOADS_CODE:
            found.append(ast.unparse(node.func))
    return found


def test_no_code_reads_anything_that_could_run() -> None:
    found = {str(path.relative_to(ROOT)): dangers(path.read_text(encoding="utf-8")) for path in sources()}
    assert len(found) > 50
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    "code",
    [
        "import pickle\nx = pickle.loads(data)",
        "import pickle\nclass Mine(pickle.Unpickler): pass",
        "import cloudpickle",
        "from pickle import loads as f",
        "import torch\nx = torch.load('f', weights_only=True)",
        "import yaml\nyaml.load(t)",
        "eval('1')",
    ],
)
def test_the_check_sees_what_it_looks_for(code: str) -> None:
    assert dangers(code)


# ---------------------------------------------------------------- nothing leads out


def rewrite_commit(run: RealRun, step: int, file: str) -> Path:
    """The commit of an event names this file, with a digest that is right."""
    (commit,) = [c for c in journal.load_commits(run.storage)[0] if c.event.step == step]
    rows = tuple(ShardRecord.model_construct(**(row.model_dump() | {"file": file})) for row in commit.records)
    forged = Commit.model_construct(**(dict(commit) | {"records": rows}))
    run.storage.write(commit.event.commit_file, [commit_file.encode(forged)])
    return run.folder / commit.event.folder


@pytest.mark.parametrize(
    "file",
    [
        "../../../outside/rank.safetensors",
        "events/../../outside",
        "/etc/passwd",
        "s3://bucket/x",
        "file:///etc/passwd",
        "..\\outside",
        "events/..",
    ],
)
def test_a_commit_that_names_a_path_outside_the_store_counts_as_absent(run: RealRun, file: str) -> None:
    rewrite_commit(run, 12, file)
    facts = journal.load_facts(run.storage)
    assert [event.step for event in facts.damaged] == [12]
    assert any("counts as absent" in note and "step-00000012" in note for note in facts.notes)
    plan = make_plan(facts, PlanRequest(2))
    assert plan is not None
    assert max(layer.step for layer in plan.layers) == 10


@pytest.mark.parametrize("file", ["", ".", "./run.json", "events//x", "events"])
def test_a_commit_that_names_no_object_costs_its_layers_an_older_version(run: RealRun, file: str) -> None:
    rewrite_commit(run, 12, file)
    plan = make_plan(journal.load_facts(run.storage), PlanRequest(2))
    assert plan is not None
    wanted = {
        spec.name: [Wanted(param, 0, param.numel) for param in spec.params] for spec in layer_map().layers
    }
    fetcher = Fetcher(run.storage)
    found = {version.layer: fetcher.fetch(version, wanted[version.layer]) for version in plan.layers}
    assert [name for name, one in found.items() if isinstance(one, BadShard)] == ["layers.0"]


def test_a_shard_that_became_a_link_to_the_same_bytes_outside_is_bad(run: RealRun, tmp_path: Path) -> None:
    for rank in range(RANKS):
        shard = run.folder / f"events/step-00000012.a001/rank-{rank:05d}.safetensors"
        shutil.move(shard, tmp_path / f"outside-{rank}")
        shard.symlink_to(tmp_path / f"outside-{rank}")
    bad = audit(run.storage, journal.load_facts(run.storage)).bad
    assert {(fault.layer, fault.step) for fault in bad} == {("layers.0", 12)}


def test_i5_collection_deletes_a_link_and_never_what_it_leads_to(run: RealRun, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    shutil.copytree(run.folder / "events/step-00000012.a001", outside)
    (run.folder / "events/step-00000003.a000").symlink_to(outside)
    (run.folder / "events/step-00000003.a001").symlink_to(outside)
    before = {path.name: path.read_bytes() for path in outside.iterdir()}
    again = RealRun(run.folder.parent, token="t2")
    again.save(15)
    again.save(16)
    assert {path.name: path.read_bytes() for path in outside.iterdir()} == before
    assert not (run.folder / "events/step-00000003.a001").exists(), "an orphan, swept like any other"


def test_records_behind_links_are_not_read_and_are_replaced_not_followed(
    run: RealRun, tmp_path: Path
) -> None:
    outside = tmp_path / "outside.json"
    shutil.move(run.folder / "attempts/a001.progress.json", outside)
    (run.folder / "attempts/a001.progress.json").symlink_to(outside)
    (run.folder / "attempts/a002.json").symlink_to(outside)
    before = outside.read_bytes()
    facts = journal.load_facts(run.storage)
    assert facts.progress == {}
    assert set(facts.attempts) == {1}
    assert facts.highest_attempt == 2, "its number is not used again"
    run.beat(15)
    run.coordinator.close()
    again = RealRun(run.folder.parent, token="t2")
    assert again.attempt == 3
    assert outside.read_bytes() == before


@pytest.mark.parametrize(
    "name", ["../out.txt", "..", "", "/etc/x", "a/b.json", "a\\b", "config.json", "x\0y"]
)
def test_tokenizer_files_of_a_hostile_run_json_stay_in_the_export_and_replace_nothing(
    tmp_path: Path, name: str
) -> None:
    from layercheck.export.composite import Composite
    from layercheck.export.hf_files import write_hf

    store = shelf(tmp_path / "store", {"norm": ((5,),)})
    config = {"model_type": "qwen2"}
    files = {name: "hostile", "tokenizer.json": "{}"}
    record = store.run.model_copy(update={"model_config_json": config, "tokenizer_files": files})
    plan = plan_of((store.put(record.layer_map.layers[0], 5, 2),))
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    (tmp_path / "out").mkdir()
    notes = write_hf(Composite(store.storage, record, plan), tmp_path / "out")
    made = {
        path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file() and path not in before
    }
    assert {str(path) for path in made} == {
        "out/config.json", "out/model.safetensors", "out/tokenizer.json",
    }  # fmt: skip
    assert "hostile" not in (tmp_path / "out/config.json").read_text()
    assert any(repr(name) in note for note in notes)


# ---------------------------------------------------------------- no secrets


class _Client:
    """Takes the run record that a session would write."""

    def __init__(self) -> None:
        self.record: RunRecord | None = None

    def open_run(self, run: RunRecord, probe: str) -> tuple[str, ...]:
        self.record = run
        return ()

    def begin_attempt(self, *_: Any) -> AttemptGrant:
        return AttemptGrant(attempt=1, r_b=0)


def test_no_secret_of_configuration_or_environment_reaches_run_json(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch import nn

    from layercheck.recovery.begin import Submission, _claim

    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    settings = {
        "run": {"storage": f"s3://me:{SECRET}@bucket/runs", "name": "r1"},
        "hub": {"hf_token": "hf_abcdefgh", "revision": "main"},
        "command": f"python -m app --key {SECRET}",
    }
    model = SimpleNamespace(module=nn.Linear(1, 1))
    zero3 = SimpleNamespace(
        layer_map=layer_map(), optimizer=object(), optimizer_groups=tuple, world_size=2, rank=0, engine=model
    )
    client = _Client()
    submission = Submission("r1", "s1", False, {"config": settings})
    _claim(zero3, client, LayerCheckConfig(), submission, "probe", {}, "token", ())  # type: ignore[arg-type]
    assert client.record is not None
    written = journal.dump(client.record).decode()
    assert SECRET not in written
    assert "hf_abcdefgh" not in written
    assert '"revision":"main"' in written
    assert "s3://(hidden)@bucket/runs" in written
