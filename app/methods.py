"""Which object protects a run: LayerCheck's session, one of the baselines, or none at all."""

import uuid
from collections.abc import Callable

import layercheck
from app.baselines.commits import CommitStore
from app.baselines.committer import Committer, own_group
from app.baselines.none import NoSession
from app.baselines.protocol import Baseline, MethodSession
from app.baselines.session import BaselineSession, RunPlace
from app.config import Config
from app.step import Job
from layercheck.coordination import journal
from layercheck.coordination.plan import is_fresh
from layercheck.coordination.protocol import CoordinatorClient
from layercheck.memory.protocol import Vaults
from layercheck.model_facts import tokenizer_files
from layercheck.persistence.storage import Storage, open_run_folder, open_storage
from layercheck.zero3 import Zero3Engine

Maker = Callable[[Config, Zero3Engine, Storage], Baseline]


def open_session(
    job: Job,
    coordinator: CoordinatorClient | None,
    submission: str | None,
    takeover: bool,
    vaults: Vaults | None = None,
) -> MethodSession:
    """The session of `checkpoint.method`. A collective.

    Args:
        job: of this rank.
        coordinator: of LayerCheck alone; None runs it inside rank 0.
        submission: the same for all restarts of one submission.
        takeover: LayerCheck alone: fence off another submission.
        vaults: LayerCheck alone: those of its memory tier.
    """
    config = job.config
    method = config.checkpoint.method
    if method == "none":
        return NoSession()
    if method == "layercheck":
        return layercheck.attach(
            job.engine,
            storage=config.run.storage_root,
            run=config.run.name,
            config=config.checkpoint.settings,
            coordinator=coordinator,
            submission=submission,
            takeover=takeover,
            run_info={"config": config.resolved(), "tokenizer_files": tokenizer_files(job.dataset.tokenizer)},
            vaults=vaults,
        )
    return open_baseline(job, submission)


def open_baseline(job: Job, submission: str | None, make: Maker | None = None) -> BaselineSession:
    """The session of a baseline. A collective.

    Args:
        job: of this rank.
        submission: the same for all restarts of one submission.
        make: in the place of what makes the baseline of `checkpoint.method`.
    """
    config, method = job.config, job.config.checkpoint.method
    settings, zero3 = config.checkpoint.settings, Zero3Engine(job.engine)
    place = RunPlace(
        storage=open_run_folder(config.run.storage_root, config.run.name),
        folder=config.run.folder,
        method=method,
        submission=submission or uuid.uuid4().hex,
        hang_s=settings.hang_s,
        wait_s=settings.storage_wait_s,
        flush_s=settings.metrics_flush_s,
    )
    make = make or _MAKERS[method]
    return BaselineSession(make(config, zero3, place.storage), zero3, place)


def will_recover(config: Config) -> bool:
    """True if the store holds anything to recover: then a session recovers it or refuses, nothing else."""
    method, where = config.checkpoint.method, (config.run.storage_root, config.run.name)
    if method == "none":
        return False
    if method == "layercheck":
        storage = open_storage(*where)
        return journal.read_run(storage) is not None and not is_fresh(journal.load_facts(storage))
    return bool(CommitStore(open_run_folder(*where), method).committed())


# ---------------------------------------------------------------- baselines; each is loaded when chosen


def committer_of(config: Config, zero3: Zero3Engine, storage: Storage, prefix: str = "step") -> Committer:
    """Makes the commits of the configured method, on a group of its own. A collective."""
    return Committer(
        CommitStore(storage, config.checkpoint.method, prefix),
        own_group(config.checkpoint.settings.storage_wait_s),
        layers=len(zero3.layer_map.layers),
        keep=config.checkpoint.baseline.keep,
    )


def _deepspeed(config: Config, zero3: Zero3Engine, storage: Storage) -> Baseline:
    from app.baselines.deepspeed import DeepSpeedCheckpoints

    every = config.checkpoint.baseline.deepspeed.interval_steps
    return DeepSpeedCheckpoints(zero3, committer_of(config, zero3, storage), every)


def _dcp_async(config: Config, zero3: Zero3Engine, storage: Storage) -> Baseline:
    from app.baselines.dcp_async import DcpAsync

    every, wait_s = (
        config.checkpoint.baseline.dcp_async.interval_steps,
        config.checkpoint.settings.storage_wait_s,
    )
    return DcpAsync(zero3, committer_of(config, zero3, storage), own_group(wait_s), every, wait_s)


def _checkfreq(config: Config, zero3: Zero3Engine, storage: Storage) -> Baseline:
    from app.baselines.checkfreq import CheckFreq

    checkpoint = config.checkpoint
    committer = committer_of(config, zero3, storage)
    return CheckFreq(zero3, committer, checkpoint.baseline.checkfreq, checkpoint.settings.storage_wait_s)


def _lowdiff(config: Config, zero3: Zero3Engine, storage: Storage) -> Baseline:
    from app.baselines.lowdiff.method import LowDiff

    committer = committer_of(config, zero3, storage)
    wait_s = config.checkpoint.settings.storage_wait_s
    return LowDiff(zero3, committer, config.checkpoint.baseline.lowdiff, wait_s)


def _gemini(config: Config, zero3: Zero3Engine, storage: Storage) -> Baseline:
    from app.baselines.gemini.actors import RayHosts
    from app.baselines.gemini.method import GeminiCopies

    settings = config.checkpoint.baseline.gemini
    hosts = RayHosts(config.run.name, config.run.storage_root, settings.keep_s, settings.wait_s)
    return GeminiCopies(zero3, committer_of(config, zero3, storage), hosts, settings)


_MAKERS: dict[str, Maker] = {
    "deepspeed": _deepspeed,
    "dcp_async": _dcp_async,
    "checkfreq": _checkfreq,
    "lowdiff": _lowdiff,
    "gemini": _gemini,
}
