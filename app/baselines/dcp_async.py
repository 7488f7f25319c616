"""The strongest stock choice today: `torch.distributed.checkpoint.async_save` every k steps."""

import re
from collections.abc import Iterator
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from app.baselines.commits import Commit, FileRecord
from app.baselines.committer import Committer, Saved
from app.baselines.newest import check_files
from app.baselines.protocol import Recovered, StepCost
from app.baselines.rolling import Background, Books, must_be_saved, roll_back
from layercheck.errors import StorageError
from layercheck.manifest import TrainerState
from layercheck.partition import ParamSlice, SubGroup
from layercheck.recovery.install import finish
from layercheck.zero3 import Zero3Engine

SCALARS = "optimizer_scalars"


class DcpAsync:
    """Asynchronous distributed checkpoints of PyTorch (torch 2.13), as torchtitan uses them.

    Not in the paper, which compares with synchronous ones. Every parameter and moment is a 1-D DTensor,
    `Shard(0)`, whose local part is the slice that ZeRO-3 gives this rank, so nothing is gathered. States
    of a save, all ranks alike:
    1. training thread: waits for the save before (two at once are not safe), hands the live tensors over.
    2. stager's thread: copies them while the next forward and backward pass run; the update waits for it.
    3. upload thread: plans and writes, fsyncs; its collectives run on a gloo group that nobody else uses.
    4. our thread: checksums and commit, on one more group.

    `torch.load` of its metadata is DCP's own; it unpickles what we wrote and whose checksums were compared.

    Simplified: one reader is one rank of the same number of ranks, although DCP could read at another. Adam's
    steps ride in the commit record. Pinned staging memory and the upload process are not used.
    """

    def __init__(
        self, zero3: Zero3Engine, committer: Committer, group: Any, interval_steps: int, wait_s: float
    ) -> None:
        self._zero3, self._committer, self._group = zero3, committer, group
        self._interval, self._wait_s = interval_steps, wait_s
        self._books, self._background = Books(), Background("app-dcp-commit")
        self._mesh = DeviceMesh.from_group(group, zero3.sub_groups[0].flat.device.type)
        # Asynchronous staging needs no CUDA: on a CPU it is a thread that copies.
        self._stager = DefaultStager(StagingOptions(False, False, True, False))
        self._staged: Future[None] | None = None
        self._torn = False
        """The optimizer has gone on before the state was staged: it must not be committed."""
        self._live: dict[str, DTensor] = {}
        self._num_states = -1
        self._attempt = 0

    # ------------------------------------------------------------------ recovery

    def recover(self) -> Recovered | None:
        """Checks every file of the newest commit, then has DCP load it."""
        check = check_files(self._committer.store, self._zero3.rank)
        found = roll_back(self._committer, self._zero3, check, self._load)
        if found is None:
            return None
        state = {key: value for key, value in found.trainer_state.items() if key != SCALARS}
        return replace(found, trainer_state=state)

    def _load(self, commit: Commit, _: None) -> None:
        zero3 = self._zero3
        reader = dcp.FileSystemReader(self._folder(commit.step))
        parts = {part.spec.name: part for part in self._parts()}
        zero3.begin_install()
        for sub_group in zero3.sub_groups:
            zero3.clear_state(sub_group.index)
        into: dict[str, Any] = {}
        for name in reader.read_metadata().state_dict_metadata:
            parameter, _, key = name.rpartition("/")
            into[name] = self._sharded(parts[parameter], zero3.room(parts[parameter], key))
        dcp.load(into, storage_reader=reader, process_group=self._group)
        for name, part in parts.items():
            zero3.set_scalars(part, commit.state[SCALARS][name])
        finish(zero3)

    # ------------------------------------------------------------------ saving

    def begin(self, attempt: int, step: int) -> None:
        """See `Baseline`."""
        self._attempt, self._books.protected_step = attempt, step

    def after_step(self, step: int, state: TrainerState) -> None:
        """Begins a save every `interval_steps`; waits for the one before."""
        self._books.note(self._background.poll())
        if step % self._interval == 0:
            self._start(step, state, "interval")

    def save_now(self, step: int, state: TrainerState) -> None:
        """See `Baseline`."""
        self._note(self._background.wait())
        if self._books.protected_step != step:
            self._start(step, state, "last")
            must_be_saved(self._note(self._background.wait()), "dcp_async")

    def _note(self, saved: Saved | None) -> Saved | None:
        self._books.note(saved)
        return saved

    def _start(self, step: int, state: TrainerState, kind: str) -> None:
        """States 1 to 4."""
        self._note(self._background.wait())
        self._torn = False
        scalars = {part.spec.name: self._zero3.scalars(part) for part in self._parts()}
        response = dcp.async_save(
            dict(self._tensors()),
            storage_writer=dcp.FileSystemWriter(self._folder(step)),
            process_group=self._group,
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse), "the stager copies in a thread of its own"
        self._staged, upload = response.staging_completion, response.upload_completion
        self._background.start(
            lambda: self._committer.commit(
                step,
                self._attempt,
                {**state, SCALARS: scalars},
                lambda: self._uploaded(step, upload),
                kind,
            )
        )

    def _tensors(self) -> dict[str, DTensor]:
        """The live state. The wrappers are made once: the tensors in them stay where they are."""
        if len(self._zero3.optimizer.state) != self._num_states:
            self._num_states = len(self._zero3.optimizer.state)
            self._live = {
                f"{part.spec.name}/{key}": self._sharded(part, tensor)
                for part in self._parts()
                for key, tensor in self._zero3.tensors(part).items()
            }
        return self._live

    def _sharded(self, part: ParamSlice, local: Tensor) -> DTensor:
        """A flattened parameter of which `local` is this rank's part; DCP cuts like ZeRO-3.

        The memory gets a storage that begins with it: DCP's stager copies whole storages, and takes a DTensor
        whose local part begins elsewhere for one that holds data itself (torch 2.13).
        """
        return DTensor.from_local(
            torch.from_dlpack(local),
            self._mesh,
            [Shard(0)],
            run_check=False,
            shape=(part.spec.numel,),
            stride=(1,),
        )

    def _parts(self) -> Iterator[ParamSlice]:
        return (part for parts in self._zero3.slices.values() for part in parts)

    def _folder(self, step: int) -> Path:
        store = self._committer.store
        return Path(store.storage.root, store.folder(step))

    def _uploaded(self, step: int, upload: Future[Any]) -> tuple[FileRecord, ...]:
        """States 3 and 4 of this rank. DCP tells all ranks of the failure of one."""
        try:
            upload.result()
        except CheckpointException as error:
            raise StorageError(f"DCP could not write step {step}: {error}") from error
        if self._torn:
            raise StorageError(f"DCP did not stage step {step} within storage_wait_s={self._wait_s:g} s")
        store, rank = self._committer.store, self._zero3.rank
        names = [path.name for path in sorted(self._folder(step).iterdir()) if path.is_file()]
        files = tuple(store.adopt_file(step, name) for name in names if _owner(name) == rank)
        store.settle(step)
        return files

    def before_update(self, group: SubGroup, lr: float) -> None:
        """Waits until the state that is being staged has been copied; training is not given up for it."""
        staged, self._staged = self._staged, None
        if staged is not None and not wait_for([staged], self._wait_s).done:
            self._torn = True

    # ------------------------------------------------------------------ books

    def take_cost(self) -> StepCost:
        """See `Baseline`."""
        return self._books.take()

    def facts(self) -> dict[str, float]:
        """See `Baseline`."""
        return {"interval_steps": self._interval, **self._books.facts()}

    def close(self, *, wait: bool) -> None:
        """See `Baseline`."""
        if wait:
            self._note(self._background.wait())
            self._stager.close()


def _owner(name: str) -> int:
    """The rank that checks a file: `__<rank>_<n>.distcp` is its own, the metadata is rank 0's."""
    match = re.match(r"__(\d+)_", name)
    return int(match[1]) if match else 0
