"""The judge of a campaign finds what it is there to find: wrong bytes, lost versions, gaps, old layers."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from cluster.campaign import main as campaign
from cluster.campaign_checks import Judge
from cluster.witness import Hashes, Notes, hash_of
from layercheck.manifest import EventId
from layercheck.persistence.shard_file import ShardAbout, ShardTensor, SliceMeta, StateScalar, layout

LAYERS = ("embed", "norm")
S_MAX = 6
PID = iter(range(1000, 2000))


def values(layer: str, step: int, attempt: int) -> bytes:
    return f"{layer:8}{step:4}{attempt:4}".encode()


def hashes(step: int, attempt: int, **others: bytes) -> Hashes:
    """What a rank notes; the first step of an attempt is the state after its optimizer step."""
    attempt = attempt if step else 0
    return {
        layer: hash_of(
            {f"{layer}.w/fp32": others.get(layer, values(layer, step, attempt))},
            {f"{layer}.w": {"step": {"kind": "int", "value": step}}},
        )
        for layer in LAYERS
    }


@dataclass
class Store:
    """A run of one rank, written as it lies on disk."""

    folder: Path
    notes: Path

    def __post_init__(self) -> None:
        self.links: list[dict[str, int]] = []
        for name in ("attempts", "events", "history"):
            (self.folder / name).mkdir(parents=True)
        self.notes.mkdir()
        (self.folder / "run.json").write_text(json.dumps({"config": {"checkpoint": {"s_max": S_MAX}}}))

    def attempt(self, r_b: int, saw_step: int, steps: range, plan: dict[str, Any] | None = None) -> int:
        """Claims the next attempt and runs its steps."""
        number = len(self.links) + 1
        self.links.append({"attempt": number, "r_b": r_b, "saw_step": saw_step})
        record = {"attempt": number, "r_b": r_b, "lineage": self.links}
        (self.folder / f"attempts/a{number:03d}.json").write_text(json.dumps(record))
        lines: list[dict[str, Any]] = [{"what": "built", "layers": {} if plan else hashes(0, 0)}]
        installed = plan.pop("installed") if plan else hashes(0, 0)
        begun = {"attempt": number, "resume_step": r_b + 1, "plan": plan}
        lines.append({"what": "begun", **begun, "layers": installed})
        lines += [{"what": "step", "step": step, "layers": hashes(step, number)} for step in steps]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (self.notes / f"rank-00000.{next(PID)}.jsonl").write_text(text)
        return number

    def commit(self, step: int, attempt: int, *layers: str, **others: bytes) -> None:
        """One event; `others` are wrong values."""
        folder = self.folder / EventId(step=step, attempt=attempt).folder
        folder.mkdir()
        data = [others.get(layer, values(layer, step, attempt if step else 0)) for layer in layers]
        shard = layout(
            [ShardTensor(f"{layer}.w", "fp32", layer, "F32", 4) for layer in layers],
            [
                SliceMeta(
                    parameter=f"{layer}.w",
                    layer=layer,
                    step=step,
                    shape=(4,),
                    offset=0,
                    numel=4,
                    state={"step": StateScalar(kind="int", value=step)},
                )
                for layer in layers
            ],
            ShardAbout(step=step, attempt=attempt, rank=0, world_size=1),
        )
        (folder / "rank-00000.safetensors").write_bytes(shard.header + b"".join(data))
        rows = [{"layer": layer, "step": step, "attempt": attempt} for layer in layers]
        pq.write_table(pa.Table.from_pylist(rows), folder / "commit.parquet")

    def judge(self) -> Judge:
        judge = Judge(self.folder, self.notes)
        judge.finish()
        return judge


def plan_for(t_fail: int, **versions: tuple[int, int]) -> dict[str, Any]:
    installed = {layer: hashes(*version)[layer] for layer, version in versions.items()}
    return {
        "mode": "composite",
        "t_fail": t_fail,
        "max_age": max(t_fail - step for step, _ in versions.values()),
        "bad": [],
        "layers": [{"name": name, "step": s, "attempt": a} for name, (s, a) in versions.items()],
        "installed": installed,
    }


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """Attempt 1 saves embed at 0, 2 and norm at 0, 3 and dies after 4; attempt 2 goes on to 6."""
    store = Store(tmp_path / "layercheck", tmp_path / "witness")
    store.attempt(0, -1, range(1, 5))
    store.commit(0, 1, *LAYERS)
    store.commit(2, 1, "embed")
    store.commit(3, 1, "norm")
    return store


def test_a_good_recovery_has_no_problems(store: Store) -> None:
    store.attempt(4, 3, range(5, 7), plan_for(4, embed=(2, 1), norm=(3, 1)))
    store.commit(6, 2, "norm")
    verdict = store.judge().verdict
    assert verdict.problems == []
    assert (verdict.max_age, verdict.lost_versions, verdict.wrong_bytes) == (2, 0, 0)
    assert verdict.compared == 2 + 5


def test_other_bytes_in_an_event_are_wrong(store: Store) -> None:
    store.commit(4, 1, "embed", embed=values("embed", 3, 1))
    verdict = store.judge().verdict
    assert verdict.wrong_bytes == 1
    assert "embed of (step, attempt) (4, 1), rank 0, stored: other bytes" in verdict.problems[0]


def test_a_version_of_a_step_that_nobody_ran_is_wrong(store: Store) -> None:
    store.commit(5, 1, "embed")
    assert "nobody saw it" in store.judge().verdict.problems[0]


def test_other_bytes_after_the_install_are_wrong(store: Store) -> None:
    plan = plan_for(4, embed=(2, 1), norm=(3, 1))
    plan["installed"]["norm"] = hashes(2, 1)["norm"]
    store.attempt(4, 3, range(5, 7), plan)
    verdict = store.judge().verdict
    assert verdict.wrong_bytes == 1
    assert "norm of (step, attempt) (3, 1), rank 0, installed by attempt 2" in verdict.problems[0]


def test_an_older_version_than_the_newest_committed_one_is_a_lost_version(store: Store) -> None:
    store.attempt(4, 3, range(5, 7), plan_for(4, embed=(2, 1), norm=(0, 1)))
    verdict = store.judge().verdict
    assert verdict.lost_versions == 1
    assert "attempt 2 took norm of (0, 1), not of (3, 1)" in verdict.problems[0]


def test_a_commit_of_a_zombie_is_not_missed(store: Store) -> None:
    store.attempt(4, 3, range(5, 7), plan_for(4, embed=(2, 1), norm=(3, 1)))
    store.commit(4, 1, "embed")  # after attempt 2 had looked
    assert store.judge().verdict.problems == []


def test_a_roll_back_takes_the_newest_event_of_all_layers(store: Store) -> None:
    good = plan_for(4, embed=(0, 1), norm=(0, 1)) | {"mode": "warmup_rollback"}
    store.attempt(0, 3, range(1, 3), good)
    assert store.judge().verdict.problems == []


def test_a_roll_back_to_an_older_full_event_is_a_loss(store: Store) -> None:
    store.commit(4, 1, *LAYERS)
    store.attempt(0, 4, range(1, 3), plan_for(4, embed=(0, 1), norm=(0, 1)) | {"mode": "warmup_rollback"})
    assert store.judge().verdict.lost_versions == 2


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([5, 7], "steps 5 to 7 with gaps ['5|7'], not 5 to 7"),
        ([5, 6, 6, 7], "gaps ['6|6']"),
        ([6, 7], "steps 6 to 7, not 5 to 7"),
    ],
)
def test_gaps_and_repetitions_of_steps_are_found(store: Store, steps: list[int], words: str) -> None:
    plan = plan_for(4, embed=(2, 1), norm=(3, 1))
    store.attempt(4, 3, steps, plan)  # type: ignore[arg-type]
    (problem,) = store.judge().verdict.problems
    assert words in problem


def test_steps_that_were_undone_may_run_again_once(store: Store) -> None:
    plan = plan_for(4, embed=(0, 1), norm=(0, 1)) | {"mode": "warmup_rollback"}
    store.attempt(0, 3, range(1, 5), plan)
    store.attempt(4, 4, range(5, 6), plan_for(4, embed=(0, 1), norm=(0, 1)))
    assert store.judge().verdict.problems == []


def test_steps_lost_between_two_attempts_are_a_gap(store: Store) -> None:
    store.attempt(6, 3, range(7, 8), plan_for(6, embed=(2, 1), norm=(3, 1)))
    assert "attempt 1 of 2: steps 1 to 4, not 1 to 6" in store.judge().verdict.problems[0]


def test_a_layer_above_the_limit_is_a_problem(store: Store) -> None:
    store.attempt(4, 3, range(5, 10), plan_for(4, embed=(2, 1), norm=(3, 1)))
    store.attempt(9, 3, range(10, 11), plan_for(9, embed=(2, 1), norm=(3, 1)))
    assert "attempt 3: age 7 is above s_max=6" in store.judge().verdict.problems


def test_a_line_that_a_kill_cut_off_is_not_read(store: Store) -> None:
    (path,) = store.notes.iterdir()
    path.write_bytes(path.read_bytes() + b'{"what": "step", "st')
    notes = Notes(store.notes)
    assert [step for step, _ in notes.lives()[0].steps] == [1, 2, 3, 4]
    path.write_bytes(path.read_bytes() + b'ep": 5, "layers": {}}\n')
    assert [step for step, _ in notes.lives()[0].steps] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("arguments", "words"), [(["--kills", "0"], "--kills 0"), (["--folder", "{used}"], "is not empty")]
)
def test_wrong_arguments_of_a_campaign_are_named(
    arguments: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "old").touch()
    with pytest.raises(SystemExit) as ended:
        campaign([text.format(used=tmp_path) for text in arguments])
    assert ended.value.code == 2
    assert words in capsys.readouterr().err
