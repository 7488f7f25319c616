"""What a store and the notes of its witness say about recoveries: the judge of a campaign.

Nothing of the planning and fetching code is used: commits, attempt records and shard files are read as they
lie, and every hash is compared with the one that the ranks took of their live tensors.
"""

import json
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from cluster.witness import Hashes, Life, Notes, hash_of
from layercheck.manifest import EventId

Version = tuple[str, int, int]
"""(layer, step, attempt)."""


@dataclass
class Verdict:
    """What the checks found; counts are of versions, `compared` and `wrong_bytes` of each rank's part."""

    lost_versions: int = 0
    wrong_bytes: int = 0
    max_age: int = 0
    compared: int = 0
    problems: list[str] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        """Counts one part of a version with other bytes than it should have."""
        self.wrong_bytes += 1
        self.problems.append(text)

    def lost(self, text: str) -> None:
        """Counts one committed version that recovery did not find."""
        self.lost_versions += 1
        self.problems.append(text)


class Judge:
    """Checks each recovery and each shard file once; may be asked again while the run goes on.

    Args:
        store: the run's `layercheck` folder.
        witness: folder of what its ranks noted.
    """

    def __init__(self, store: Path, witness: Path) -> None:
        self._store, self._notes = store, Notes(witness)
        self._judged: set[int] = set()
        self._read: set[str] = set()
        self.verdict = Verdict()

    def look(self) -> None:
        """Judges what is new."""
        rows = committed_rows(self._store)
        seen = Seen(self._notes.lives(), read_chains(self._store))
        for attempt in sorted(seen.attempts.keys() - self._judged):
            self._judged.add(attempt)
            self._recovery(seen, attempt, {(row["layer"], row["step"], row["attempt"]) for row in rows})
        for folder in sorted({folder for row in rows if (folder := row["folder"])} - self._read):
            self._read.add(folder)
            self._event(seen, folder)

    def finish(self) -> None:
        """Judges what is new and the history as a whole."""
        self.look()
        self.verdict.problems += step_problems(Seen(self._notes.lives(), read_chains(self._store)))

    # ------------------------------------------------------------------ one recovery

    def _recovery(self, seen: "Seen", attempt: int, committed: set[Version]) -> None:
        plan = seen.attempts[attempt][0].plan
        if plan is None:
            return
        self.verdict.max_age = max(self.verdict.max_age, plan["max_age"])
        s_max = json.loads((self._store / "run.json").read_text())["config"]["checkpoint"]["s_max"]
        if plan["max_age"] > s_max:
            self.verdict.problems.append(f"attempt {attempt}: age {plan['max_age']} is above s_max={s_max}")
        if plan["bad"]:
            self.verdict.problems.append(f"attempt {attempt}: bad shards {plan['bad']}")
        chain = seen.chains.get(attempt)
        whole = plan["mode"] != "composite"
        newest = {} if chain is None else newest_versions(committed, chain, plan["t_fail"], whole)
        for layer in plan["layers"]:
            name, version = layer["name"], (layer["step"], layer["attempt"])
            if version < newest.get(name, (-1, 0)):
                self.verdict.lost(f"attempt {attempt} took {name} of {version}, not of {newest[name]}")
            for life in seen.attempts[attempt]:
                assert life.installed is not None
                self._compare(
                    f"installed by attempt {attempt}", seen, life.rank, name, version, life.installed
                )

    def _compare(
        self, what: str, seen: "Seen", rank: int, layer: str, version: tuple[int, int], found: Hashes
    ) -> None:
        self.verdict.compared += 1
        truth = seen.truth(rank, *version)
        if truth is None or truth.get(layer) != found.get(layer):
            why = "nobody saw it" if truth is None else "other bytes"
            self.verdict.wrong(f"{layer} of (step, attempt) {version}, rank {rank}, {what}: {why}")

    # ------------------------------------------------------------------ one event

    def _event(self, seen: "Seen", folder: str) -> None:
        event = EventId.parse(folder)
        assert event is not None
        for path in sorted((self._store / folder).glob("rank-*.safetensors")):
            try:
                layers = _hashes_of_file(path)
            except FileNotFoundError:
                continue  # collected meanwhile
            rank = int(path.stem.removeprefix("rank-"))
            for layer in layers:
                self._compare("stored", seen, rank, layer, (event.step, event.attempt), layers)


@dataclass(frozen=True)
class Link:
    """One attempt of a chain: it began after step `r_b`, and saw its predecessor's commits to `saw_step`."""

    attempt: int
    r_b: int
    saw_step: int


Chain = tuple[Link, ...]
"""An attempt's lineage, oldest first; the last link is its own."""


@dataclass(frozen=True)
class Seen:
    """What the witnesses and the attempt records say at one moment."""

    lives: list[Life]
    chains: dict[int, Chain]

    @cached_property
    def attempts(self) -> dict[int, list[Life]]:
        """Attempt -> the lives that began it, rank 0 first; only those whose rank 0 did."""
        found: dict[int, list[Life]] = {}
        for life in self.lives:
            if life.installed is not None:
                found.setdefault(life.attempt, []).append(life)
        return {attempt: lives for attempt, lives in found.items() if lives[0].rank == 0}

    def truth(self, rank: int, step: int, attempt: int) -> Hashes | None:
        """What a rank's state was after a step of an attempt, as the rank itself noted it."""
        return self._truths.get((rank, step, attempt if step else 0))

    @cached_property
    def _truths(self) -> dict[tuple[int, int, int], Hashes]:
        truths: dict[tuple[int, int, int], Hashes] = {}
        for life in self.lives:
            if life.built:
                truths[life.rank, 0, 0] = life.built  # the same seed: equal in every life
            for step, hashes in life.steps:
                truths[life.rank, step, life.attempt] = hashes
        return truths


def step_problems(seen: Seen) -> list[str]:
    """Gaps and repetitions: in the history that counts, each step number was run exactly once."""
    problems = []
    began = {attempt: chain[-1].r_b for attempt, chain in seen.chains.items()}
    newest = max(began, default=0)
    for attempt, lives in sorted(seen.attempts.items()):
        ran = [step for step, _ in lives[0].steps]
        until = min((r_b for later, r_b in began.items() if later > attempt), default=max(ran, default=0))
        counted = [step for step in ran if step <= until]
        wanted = list(range(began.get(attempt, 0) + 1, until + 1))
        if counted != wanted:
            problems.append(f"attempt {attempt} of {newest}: steps {_spans(counted)}, not {_spans(wanted)}")
    return problems


def _spans(steps: list[int]) -> str:
    if not steps:
        return "none"
    gaps = [f"{a}|{b}" for a, b in pairwise(steps) if b != a + 1]
    return f"{steps[0]} to {steps[-1]}" + (f" with gaps {gaps}" if gaps else "")


def newest_versions(
    committed: set[Version], chain: Chain, t_fail: int, whole: bool
) -> dict[str, tuple[int, int]]:
    """Layer -> (step, attempt) of its newest committed version that counts for a new attempt.

    Args:
        committed: all versions.
        chain: the new attempt's.
        t_fail: last step that was complete before it.
        whole: take the newest step at which every layer has a version.
    """
    live = {version for version in committed if _counts(version, chain) and version[1] <= t_fail}
    names = {layer for layer, _, _ in live}
    if whole:
        steps = [{(step, attempt) for layer, step, attempt in live if layer == name} for name in names]
        live = {(name, *max(set.intersection(*steps), default=(-1, 0))) for name in names} if names else set()
    return {name: max((step, a) for layer, step, a in live if layer == name) for name in names}


def _counts(version: Version, chain: Chain) -> bool:
    _, step, attempt = version
    position = next((i for i, link in enumerate(chain[:-1]) if link.attempt == attempt), None)
    if position is None:
        return False
    later = chain[position + 1 :]
    return step <= later[0].saw_step and all(step <= link.r_b for link in later[:-1])


# ---------------------------------------------------------------- files as they lie


def read_chains(store: Path) -> dict[int, Chain]:
    """Attempt -> its lineage, of every attempt record that can be read."""
    chains = {}
    for path in (store / "attempts").glob("a[0-9]*.json"):
        if path.name.count(".") == 1:
            record = json.loads(path.read_text())
            links = [Link(link["attempt"], link["r_b"], link["saw_step"]) for link in record["lineage"]]
            chains[int(record["attempt"])] = tuple(links)
    return chains


def committed_rows(store: Path) -> list[dict[str, Any]]:
    """A row (layer, step, attempt, folder) of each version ever committed; no folder for one collected."""
    rows: list[dict[str, Any]] = []
    for path in sorted((store / "history").glob("*.parquet")):
        rows += [{**row, "folder": ""} for row in _rows(path)]
    for path in sorted((store / "events").glob("*/commit.parquet")):
        rows += [{**row, "folder": f"events/{path.parent.name}"} for row in _rows(path)]
    return rows


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return list(pq.read_table(path, columns=["layer", "step", "attempt"]).to_pylist())
    except (FileNotFoundError, pa.ArrowInvalid):
        return []  # collected meanwhile; what cannot be read counts as absent


def _hashes_of_file(path: Path) -> Hashes:
    """Layer -> hash of a shard file's part, made as the witness makes it."""
    content = path.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:start])
    metadata = {k: json.loads(text) for k, text in header.pop("__metadata__").items() if k != "layercheck"}
    tensors: dict[str, dict[str, bytes]] = {meta["layer"]: {} for meta in metadata.values()}
    scalars: dict[str, dict[str, Any]] = {layer: {} for layer in tensors}
    for parameter, meta in metadata.items():
        scalars[meta["layer"]][parameter] = meta["state"]
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        if end > begin:
            layer = metadata[name.rpartition("/")[0]]["layer"]
            tensors[layer][name] = content[start + begin : start + end]
    return {layer: hash_of(tensors[layer], scalars[layer]) for layer in tensors}
