"""What a store and the notes of its witness say about recoveries: the judge of a campaign.

Nothing of the planning and fetching code is used: commits, attempt records and shard files are read as they
lie, and every hash is compared with the one that the ranks took of their live tensors.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from cluster.campaign_files import Chain, Save, State, committed_saves, read_chains, read_parts
from cluster.campaign_residuals import missed, residuals_of, restored, versions_of
from cluster.witness import Hashes, Life, Notes
from layercheck.manifest import EventId

_ROLL_BACKS = ("uniform", "warmup_rollback")


@dataclass
class Verdict:
    """What the checks found; the lost are counted once, what was compared and wrong for each rank's part.

    `compared_residuals` are those of the compared parts that came back with a residual.
    """

    lost_versions: int = 0
    lost_residuals: int = 0
    wrong_bytes: int = 0
    max_age: int = 0
    compared: int = 0
    compared_residuals: int = 0
    problems: list[str] = field(default_factory=list)

    def wrong(self, text: str) -> None:
        """Counts one part of a version with other bytes than it should have."""
        self.wrong_bytes += 1
        self.problems.append(text)

    def lost(self, text: str) -> None:
        """Counts one committed version that recovery did not find."""
        self.lost_versions += 1
        self.problems.append(text)

    def lost_residual(self, text: str) -> None:
        """Counts one committed residual that recovery did not add."""
        self.lost_residuals += 1
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
        # Read before the notes: the step of each of these events is in them.
        stored = committed_saves(self._store)
        seen = Seen(self._notes.lives(), read_chains(self._store))
        # Read after the notes: whatever the plans in them could take is here.
        known = committed_saves(self._store)
        for attempt in sorted(seen.attempts.keys() - self._judged):
            self._judged.add(attempt)
            self._recovery(seen, attempt, known)
        for folder in sorted({save.folder for save in stored if save.folder} - self._read):
            self._read.add(folder)
            added = {save.layer for save in stored if save.folder == folder and save.base is not None}
            self._event(seen, folder, added)

    def finish(self) -> None:
        """Judges what is new and the history as a whole."""
        self.look()
        self.verdict.problems += step_problems(Seen(self._notes.lives(), read_chains(self._store)))

    # ------------------------------------------------------------------ one recovery

    def _recovery(self, seen: "Seen", attempt: int, saves: set[Save]) -> None:
        plan = seen.attempts[attempt][0].plan
        if plan is None:
            return
        self._ages(attempt, plan)
        live = live_saves(saves, seen.chains.get(attempt, ()), plan["t_fail"])
        rolls_back = plan["mode"] in _ROLL_BACKS
        newest = newest_versions(live, rolls_back)
        for row in plan["layers"]:
            name, version = row["name"], (row["step"], row["attempt"])
            if version < newest.get(name, (-1, 0)):
                self.verdict.lost(f"attempt {attempt} took {name} of {version}, not of {newest[name]}")
            # The state of one step, which a roll-back goes to, takes none.
            residuals = [] if rolls_back else residuals_of(live, name, version)
            if better := missed(residuals, row["residual"]):
                had = "no residual" if row["residual"] is None else f"the residual of {row['residual']}"
                self.verdict.lost_residual(
                    f"attempt {attempt} took {name} of {version} with {had}, not with that of {better.step}"
                )
            taken = [save for save in residuals if save.step == row["residual"]]
            for life in seen.attempts[attempt]:
                if row["residual"] is None:
                    self._installed(seen, life, row)
                else:
                    self._installed_sum(life, row, versions_of(saves, name, version), taken)

    def _ages(self, attempt: int, plan: dict[str, Any]) -> None:
        self.verdict.max_age = max(self.verdict.max_age, plan["max_age"])
        s_max = json.loads((self._store / "run.json").read_text())["config"]["checkpoint"]["s_max"]
        if plan["max_age"] > s_max:
            self.verdict.problems.append(f"attempt {attempt}: age {plan['max_age']} is above s_max={s_max}")
        if plan["bad"]:
            self.verdict.problems.append(f"attempt {attempt}: bad shards {plan['bad']}")

    def _installed(self, seen: "Seen", life: Life, row: dict[str, Any]) -> None:
        """One rank's part of a layer that came back as its version."""
        assert life.installed is not None
        version = row["step"], row["attempt"]
        what = f"installed by attempt {life.attempt}"
        self._compare(what, seen, life.rank, row["name"], version, life.installed)

    def _installed_sum(
        self, life: Life, row: dict[str, Any], versions: list[Save], residuals: list[Save]
    ) -> None:
        """The same of a layer with a residual; nothing is said where a file of it was collected meanwhile."""
        assert life.installed is not None
        what = (
            f"{row['name']} of (step, attempt) {(row['step'], row['attempt'])} and the residual of "
            f"{row['residual']}, rank {life.rank}, installed by attempt {life.attempt}"
        )
        if not residuals:
            self.verdict.wrong(f"{what}: no such residual counts")
            return
        wanted = restored(self._store, versions, residuals, life.rank)
        if wanted is None:
            return
        self.verdict.compared += 1
        self.verdict.compared_residuals += 1
        if wanted.hash != life.installed.get(row["name"]):
            self.verdict.wrong(f"{what}: other bytes")

    def _compare(self, what: str, seen: "Seen", rank: int, layer: str, version: State, found: Hashes) -> None:
        self.verdict.compared += 1
        truth = seen.truth(rank, *version)
        if truth is None or truth.get(layer) != found.get(layer):
            why = "nobody saw it" if truth is None else "other bytes"
            self.verdict.wrong(f"{layer} of (step, attempt) {version}, rank {rank}, {what}: {why}")

    # ------------------------------------------------------------------ one event

    def _event(self, seen: "Seen", folder: str, residuals: set[str]) -> None:
        """Versions are what the ranks noted; residuals are rounded, and seen again at a recovery."""
        event = EventId.parse(folder)
        assert event is not None
        for path in sorted((self._store / folder).glob("rank-*.safetensors")):
            try:
                parts = read_parts(path)
            except FileNotFoundError:
                continue  # collected meanwhile
            rank = int(path.stem.removeprefix("rank-"))
            hashes = {layer: part.hash for layer, part in parts.items() if layer not in residuals}
            for layer in hashes:
                self._compare("stored", seen, rank, layer, (event.step, event.attempt), hashes)


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


def live_saves(saves: Iterable[Save], chain: Chain, t_fail: int) -> set[Save]:
    """What counts for a new attempt: its chain, and the last step that was complete before it."""
    return {save for save in saves if _counts(save, chain) and save.step <= t_fail}


def _counts(save: Save, chain: Chain) -> bool:
    position = next((i for i, link in enumerate(chain[:-1]) if link.attempt == save.attempt), None)
    if position is None:
        return False
    later = chain[position + 1 :]
    return save.step <= later[0].saw_step and all(save.step <= link.r_b for link in later[:-1])


def newest_versions(live: Iterable[Save], whole: bool) -> dict[str, State]:
    """Layer -> its newest version of those that count.

    Args:
        live: what counts, residuals too.
        whole: take the newest step at which every layer has a version.
    """
    states: dict[str, set[State]] = {}
    for save in live:
        if save.base is None:
            states.setdefault(save.layer, set()).add(save.state)
    if whole and states:
        common = set.intersection(*states.values())
        return {name: max(common, default=(-1, 0)) for name in states}
    return {name: max(of_layer) for name, of_layer in states.items()}
