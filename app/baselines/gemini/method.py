"""GEMINI: a copy of every rank's state in the memory of its own host and of a peer, at every step."""

import json
import logging
import os
import time
from dataclasses import replace

import torch.distributed as dist

from app.baselines.commits import Commit, FileRecord
from app.baselines.committer import Committer, Saved
from app.baselines.gemini.actors import Hosts
from app.baselines.gemini.box import Box, as_tensor
from app.baselines.gemini.exchange import Exchange
from app.baselines.gemini.find import Finder, Found
from app.baselines.gemini.host import Key
from app.baselines.gemini.memory import HostMemoryError
from app.baselines.gemini.placement import Placement, place
from app.baselines.gemini.records import BoxShape
from app.baselines.gemini.replicator import Image, Replicator, RoundCost
from app.baselines.protocol import Recovered, StepCost
from app.baselines.rolling import Background, Books, must_be_saved, roll_back
from app.baselines.settings import GeminiSettings
from app.baselines.state import StateImage, capture, install
from layercheck.errors import ConfigError, DamagedShardError, NoPlanError
from layercheck.manifest import TrainerState
from layercheck.recovery.collectives import count_over_ranks, on_rank_zero
from layercheck.zero3 import SubGroup, Zero3Engine

log = logging.getLogger("app")
_SLACK_BYTES = 64 << 10


class GeminiCopies:
    """GEMINI (SOSP 2023; placement and recovery of its sections 4 and 6), with m = 2.

    Every `interval_steps` the state (12 bytes a parameter over all ranks) goes into the memory of the own
    host and from there to a peer's; `replicator.py` says how, `decision.py` what a recovery uses. One store
    process a host keeps the memory and outlives the trainers. A copy has two slots: 24 bytes a parameter, 48
    in all with the replicas. Each `storage_every` steps one state goes to the storage, in the background;
    its copy into a buffer of its own is made at once.

    Simplified: no schedule of idle network spans (the exchange goes on beside the next step and may slow it:
    its seconds and bytes are among the figures), no buffers on the accelerator and no RDMA (pageable host
    memory, gloo), no operator for new machines and no key-value store (Ray has both). Not tried again within
    an attempt: after a failed exchange the last aligned step and the storage are what protects.
    """

    def __init__(
        self, zero3: Zero3Engine, committer: Committer, hosts: Hosts, settings: GeminiSettings
    ) -> None:
        self._zero3, self._committer, self._hosts, self._settings = zero3, committer, hosts, settings
        self._exchange = Exchange(settings.chunk_bytes, settings.wait_s)
        self._placement: Placement = place([hosts.here] * zero3.world_size)
        self._run_id, self._mark = "", b""
        self._attempt, self._began = 0, 0
        self._replicator: Replicator | None = None
        self._needs: dict[Key, BoxShape] = {}
        self._slack_bytes = 0
        self._tidy = False
        self._books, self._background, self._image = Books(), Background("gemini"), StateImage()
        self._alerts: list[str] = []
        self._rounds: list[RoundCost] = []
        self._waited = {"gate_s": 0.0, "pressure_s": 0.0}

    # ------------------------------------------------------------------ recovery

    def recover(self) -> Recovered | None:
        """Decides between memory and storage; everyone installs the same step of the same life."""
        started = time.monotonic()
        self._run_id, self._mark = on_rank_zero(lambda: (self._identity(), os.urandom(8)))
        self._hosts.own().enter(self._run_id, self._mark, os.getpid())
        finder = Finder(self._hosts, self._exchange, self._run_id)
        self._placement = place(finder.places)
        plan_s, store = time.monotonic() - started, self._committer.store
        newest = on_rank_zero(lambda: next(iter(store.committed()), None))
        found, stored = finder.find(newest), None
        if found.decision.kind == "remote":
            stored, error = self._from_storage()
            # The newest commit may have been torn: then the memory may be newer after all.
            found = finder.find(None if stored is None else stored.step)
            if found.shard is None and error is not None:
                raise error
        if found.shard is None:
            if stored is None:
                self._go_on_from(0)
            return stored
        return self._from_memory(found, plan_s, time.monotonic() - started - plan_s)

    def _identity(self) -> str:
        """Written once in the life of the run: memory left by another run of its name is not ours."""
        storage, path = self._committer.store.storage, f"{self._committer.store.method}/run-id"
        storage.create(path, os.urandom(8).hex().encode())
        return storage.read(path).decode()

    def _from_storage(self) -> tuple[Recovered | None, NoPlanError | None]:
        def read(commit: Commit) -> None:
            (file,) = commit.files[self._zero3.rank]
            self._committer.store.read_file(commit.step, file, self._image.room(file.nbytes))

        def put(commit: Commit, _: None) -> None:
            install(self._zero3, self._image.tensor, f"step {commit.step} of the storage")

        try:
            stored = roll_back(self._committer, self._zero3, read, put)
        except NoPlanError as error:
            return None, error
        self._books.protected_step = 0 if stored is None else stored.step
        return stored, None

    def _from_memory(self, found: Found, plan_s: float, load_s: float) -> Recovered:
        step, shard, sources = found.decision.step, found.shard, found.decision.sources
        assert shard is not None
        started = time.monotonic()
        install(self._zero3, shard.data, f"step {step} in host memory")
        self._go_on_from(step)
        pulled = [source for source in sources if source.how != "own"]
        return Recovered(
            step=step,
            trainer_state=json.loads(bytes(shard.meta.numpy())),
            plan_s=plan_s,
            load_s=load_s,
            reconstruct_s=time.monotonic() - started,
            nbytes=sum(source.copy.record.data_bytes for source in sources),
            source=f"host memory, step {step}: {len(sources) - len(pulled)} shards of the own host, "
            f"{len(pulled)} of another",
        )

    def _go_on_from(self, step: int) -> None:
        """Storage that a dead writer left half done goes; the counts go on from the newest commit."""
        store = self._committer.store

        def newest() -> Commit | None:
            store.roll_back_to(step)
            try:
                return next((store.read(older) for older in store.committed()), None)
            except DamagedShardError:
                return None  # the counts alone suffer

        if (commit := on_rank_zero(newest)) is not None:
            self._committer.goes_on_from(commit)

    # ------------------------------------------------------------------ steps

    def begin(self, attempt: int, step: int) -> None:
        """See `Baseline`. Says aloud what one host's loss would take."""
        self._attempt, self._began = attempt, step
        exposed = self._placement.dies_with_one_host
        if exposed and self._zero3.rank == 0:
            log.warning(
                "gemini: both copies of the ranks %s are on one host (Ray node): memory protects against the "
                "loss of trainers, not of that host; use at least two nodes",
                list(exposed),
            )

    def after_step(self, step: int, state: TrainerState) -> None:
        """Starts the copies of this step; waits for the exchange of those before."""
        self._books.note(self._background.poll())
        if step % self._settings.interval_steps == 0:
            self._copy(step, state)
        if step % self._settings.storage_every == 0:
            self._start_saving(step, state, "interval")

    def _copy(self, step: int, state: TrainerState) -> None:
        captured = capture(self._zero3, step, self._attempt)
        header = as_tensor(captured.shard.header)
        image = Image(step, json.dumps(state).encode(), (header, *captured.sources))
        if self._replicator is None:
            self._replicator = self._open(image, header.nbytes)
        started = time.monotonic()
        self._replicator.wait()
        self._waited["pressure_s"] += time.monotonic() - started
        self._look_after(self._replicator)
        self._replicator.begin(image)

    def _open(self, image: Image, header_bytes: int) -> Replicator:
        """Makes room on all hosts, once all ranks know the sizes of all shards. A collective.

        Raises:
            ConfigError: some host has not enough memory; on all ranks.
        """
        told: list[tuple[BoxShape, int]] = [(image.shape, header_bytes)] * self._zero3.world_size
        dist.all_gather_object(told, told[0], group=self._exchange.group)
        rank = self._zero3.rank
        mine = ((rank, rank), *((shard, rank) for shard in self._placement.kept_by(rank)))
        self._needs = {key: told[key[0]][0] for key in mine}
        self._slack_bytes = _SLACK_BYTES + max(nbytes for _, nbytes in told)
        boxes, refused = {}, None
        try:
            boxes = self._boxes()
        except ConfigError as error:
            refused = error
        if count_over_ranks(int(refused is not None), self._zero3.collective_device):
            raise refused or ConfigError("checkpoint.method=gemini: another host has too little memory")
        return Replicator(
            rank, self._placement, self._mark, boxes, self._exchange, self._began, self._settings.wait_s
        )

    def _boxes(self) -> dict[Key, Box]:
        opened = self._hosts.own().open(self._needs, self._slack_bytes)
        return {key: Box(*found) for key, found in opened.items()}

    def _look_after(self, replicator: Replicator) -> None:
        """Between two rounds: memory that nobody wants goes, a store that died is replaced."""
        try:
            if not self._tidy and replicator.aligned > self._began:
                self._hosts.own().keep_only(self._placement.keys_on(self._hosts.here))
                self._tidy = True
            if not all(box.is_kept for box in replicator.boxes.values()):
                self._alerts.append(
                    "the store of this host has died and its copies with it: a new one starts"
                )
                self._hosts.own().enter(self._run_id, self._mark, os.getpid())
                replicator.boxes.update(self._boxes())
        except HostMemoryError as error:
            self._alerts.append(str(error))

    def before_update(self, group: SubGroup, lr: float) -> None:
        """The update gate."""
        if self._replicator is not None:
            started = time.monotonic()
            self._replicator.hold_back()
            self._waited["gate_s"] += time.monotonic() - started

    # ------------------------------------------------------------------ storage

    def save_now(self, step: int, state: TrainerState) -> None:
        """See `Baseline`: memory alone would not outlive the cluster."""
        self._books.note(self._background.wait())
        if self._books.protected_step != step:
            self._start_saving(step, state, "last")
            saved = self._background.wait()
            self._books.note(saved)
            must_be_saved(saved, "gemini")

    def _start_saving(self, step: int, state: TrainerState, kind: str) -> None:
        self._books.note(self._background.wait())
        self._image.fill(capture(self._zero3, step, self._attempt))
        store, name = self._committer.store, f"rank-{self._zero3.rank:05d}.safetensors"

        def commit() -> Saved:
            def write() -> tuple[FileRecord, ...]:
                return (store.write_file(step, name, self._image.chunks()),)

            return self._committer.commit(step, self._attempt, state, write, kind)

        self._background.start(commit)

    # ------------------------------------------------------------------ figures, the end

    def take_cost(self) -> StepCost:
        """See `Baseline`. What host memory protects counts as protected."""
        cost, alerts = self._books.take(), tuple(self._alerts)
        self._alerts.clear()
        self._collect()
        if self._replicator is None:
            return replace(cost, alerts=cost.alerts + alerts)
        return replace(
            cost,
            protected_step=max(cost.protected_step, self._replicator.aligned),
            alerts=cost.alerts + alerts + self._replicator.take_alerts(),
        )

    def _collect(self) -> None:
        while self._replicator is not None and self._replicator.costs:
            self._rounds.append(self._replicator.costs.popleft())

    def facts(self) -> dict[str, float]:
        """See `Baseline`; bytes and seconds of this rank."""
        rounds = self._rounds
        return {
            "interval_steps": self._settings.interval_steps,
            "storage_every_steps": self._settings.storage_every,
            "rounds": len(rounds),
            "aligned_rounds": sum(each.aligned for each in rounds),
            "host_bytes": sum(each.host_bytes for each in rounds),
            "network_bytes": sum(each.sent_bytes for each in rounds),
            "host_memory_bytes": sum(need.nbytes for need in self._needs.values()),
            "copy_s": _mean([each.copy_s for each in rounds]),
            "exchange_s": _mean([each.exchange_s for each in rounds]),
            **self._waited,
            **self._books.facts(),
        }

    def close(self, *, wait: bool) -> None:
        """See `Baseline`. The memory is given back when all that it protected is in the storage."""
        if self._replicator is not None:
            self._replicator.close(wait=wait)
        self._collect()
        if not wait:
            return
        self._books.note(self._background.wait())
        if self._books.protected_step == self._zero3.step and self._zero3.rank == 0:
            self._hosts.end_all()


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
