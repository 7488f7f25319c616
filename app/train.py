"""The entry of the training application: checks, Ray, the worker group, the summary."""

import argparse
import logging
import os
import shutil
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayActorError
from ray.train import Checkpoint, FailureConfig, RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from ray.train.v2.api.exceptions import TrainingFailedError

from app.config import Config, load_config, parse
from app.curves import check_curves
from app.failure_notes import FailureNotes
from app.memory_check import estimated_memory
from app.runfiles import RunFiles
from app.sources import check_source
from app.summary import Observed, describe_resumed, describe_summary, write_summary
from app.train_result import TrainResult
from cluster.client import connect
from cluster.coordinator import start_coordinator
from cluster.faults import FaultPlan
from cluster.guard import GroupGuard, ray_train_limits
from cluster.locks import prepare_extensions
from cluster.preemption import Drains, WatchingTorchConfig, driver_signals
from cluster.vault import RayVaults
from cluster.witness import Witness
from layercheck.errors import ConfigError, LayerCheckError, PreemptedError

log = logging.getLogger("app")
EXIT_CODES = {"completed": 0, "failed": 1, "refused": 1, "fenced": 3, "preempted": os.EX_TEMPFAIL}
_USAGE = 2


def main(arguments: list[str] | None = None) -> int:
    """Trains a run.

    Returns:
        The exit code: 0 completed, 1 failed or refused, 2 usage, 3 taken over, 75 (EX_TEMPFAIL) preempted:
        whoever requeues jobs by their exit code is to submit it again.
    """
    args = _parser().parse_args(arguments)
    overrides = list(args.set)
    overrides += [f"run.name={args.run_name}"] if args.run_name else []
    overrides += [f"run.storage={args.storage}"] if args.storage else []
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        config = load_config(args.config, overrides)
        if args.estimate:
            print(estimated_memory(config))
            return 0
        check_input(config)
        with ray_cluster():
            check_cluster(config)
            return _run(config, takeover=args.takeover)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return _USAGE
    except LayerCheckError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CODES["refused"]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("python -m app", description="Train a run, or continue it.")
    parser.add_argument("--config", required=True, help="name in app/configs, or a YAML file")
    parser.add_argument(
        "--set",
        action="extend",
        nargs="+",
        default=[],
        metavar="key.path=value",
        help="change settings; the last one wins",
    )
    parser.add_argument("--run-name", help="same as --set run.name=...; the same name continues a run")
    parser.add_argument("--storage", help="same as --set run.storage=...")
    parser.add_argument("--estimate", action="store_true", help="print the memory that a rank takes, and end")
    parser.add_argument("--takeover", action="store_true", help="fence off another live submission")
    return parser


# ---------------------------------------------------------------- checks before anything starts


def check_input(config: Config) -> None:
    """Finds what would fail on the workers: an unwritable storage, wrong data, wrong faults.

    Raises:
        LayerCheckError: names the setting to change.
    """
    check_source(config.data)
    check_curves(config)
    _fault_plan(config)
    RunFiles(config.run.folder).check_writable()


def check_cluster(config: Config) -> None:
    """Ray would wait without a word for workers that can never be placed.

    Raises:
        ConfigError: the whole cluster has too few CPUs or GPUs.
    """
    cluster, total = config.cluster, ray.cluster_resources()
    for kind, each in (("CPU", cluster.cpus_per_worker), ("GPU", cluster.gpus_per_worker)):
        need, have = cluster.fewest_workers * each, total.get(kind, 0.0)
        if need > have:
            knob = "workers" if cluster.min_workers is None else "min_workers"
            raise ConfigError(
                f"cluster.{knob}={cluster.fewest_workers} with {each:g} {kind}s each need {need:g}, the "
                f"cluster has {have:g}: lower cluster.{knob} or {kind.lower()}s_per_worker, or add nodes",
                need=need,
                have=have,
            )


@contextmanager
def ray_cluster() -> Iterator[None]:
    """Joins the cluster of RAY_ADDRESS; without one starts a private cluster and joins no other."""
    address = os.environ.get("RAY_ADDRESS")
    options: dict[str, Any] = {"namespace": "layercheck"}
    # An own folder: Ray's default one tells other programs of this machine which cluster to join.
    folder = None if address else tempfile.mkdtemp(prefix="lc-", dir="/tmp")
    if folder is not None:
        # Ray Train asks the dashboard (on 127.0.0.1) whether its controller lives, and complains without one.
        options |= {"include_dashboard": True, "_temp_dir": folder}
    ray.init(address=address or "local", **options)
    try:
        yield
    finally:
        ray.shutdown()
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


# ---------------------------------------------------------------- the driver


def _run(config: Config, *, takeover: bool) -> int:
    submission = uuid.uuid4().hex
    started = time.monotonic()
    result = _fit(config, submission, takeover)
    observed = Observed(submission, result, time.monotonic() - started, _fault_plan(config).injected())
    if result.status in ("refused", "fenced"):
        # Another submission owns the run, or nothing was trained: its summary is not ours to write.
        print(f"{result.status}: {result.message}", file=sys.stderr)
        return EXIT_CODES[result.status]
    summary = write_summary(config, observed)
    for resumed in summary["resumed"]:
        print(describe_resumed(resumed))
    if result.message:
        print(f"error: {result.message}", file=sys.stderr)
    if result.status == "preempted":
        print("preempted after a last save: submit the same run name again to go on", file=sys.stderr)
    print(describe_summary(summary), flush=True)
    return EXIT_CODES[result.status]


def _fit(config: Config, submission: str, takeover: bool) -> TrainResult:
    cluster = config.cluster
    hang_s, wait_s = config.checkpoint.settings.hang_s, cluster.reschedule_wait_s
    # What the environment sets already stands; Ray hands these variables on to its controller and workers.
    os.environ |= ray_train_limits(cluster.health_check_s, hang_s, wait_s) | os.environ
    if config.checkpoint.method == "layercheck":
        start_coordinator(config.run.name, config.run.storage_root, config.checkpoint.settings)
    grace_s = config.checkpoint.settings.preemption_grace_s

    def tell(seconds: float) -> None:
        client = connect(config.run.name, config.run.storage_root, config.checkpoint.settings)
        client.announce_end(submission, seconds)

    with driver_signals(_signals(config), grace_s, tell):
        try:
            returned = _fit_until_started(config, submission, takeover)
        except TrainingFailedError as error:
            ours = getattr(error, "controller_failure", None)
            return TrainResult("failed", message=str(ours if isinstance(ours, LayerCheckError) else error))
        except RayActorError as error:
            message = f"Ray Train's controller is gone: submit the run again ({error})"
            return TrainResult("failed", message=message)
    return TrainResult(**returned)


def _fit_until_started(config: Config, submission: str, takeover: bool) -> Any:
    """What rank 0 returned and where its model is. A death while the group starts costs a new controller.

    Ray Train restarts whatever dies before that moment and after it, but ends the run with the bare error of
    an actor for a death in between (seen with 2.60). Such starts count against `cluster.max_failures` too.
    """
    number = 0
    while True:
        try:
            ended = _trainer(config, submission, takeover, number).fit()
            return {**ended.return_value, "model": _place_of(ended.checkpoint, config.run.folder)}
        except TrainingFailedError as error:
            died_in_start = isinstance(getattr(error, "controller_failure", None), RayActorError)
            if not died_in_start or number == config.cluster.max_failures:
                raise
        log.warning("a worker died while its group was being started: started anew")
        number += 1


def _place_of(checkpoint: Checkpoint | None, folder: str) -> str | None:
    """A path, or a URI like that of the run's folder; None of a run that handed no model over."""
    if checkpoint is None:
        return None
    scheme, remote, _ = folder.partition("://")
    return f"{scheme}{remote}{checkpoint.path}" if remote else str(checkpoint.path)


def _trainer(config: Config, submission: str, takeover: bool, number: int) -> TorchTrainer:
    """Ray Train's part of a run; `number` tells the controllers of one submission apart."""
    cluster = config.cluster
    resources = {"CPU": cluster.cpus_per_worker}
    if cluster.gpus_per_worker:
        resources["GPU"] = cluster.gpus_per_worker
    return TorchTrainer(
        worker,
        train_loop_config={"config": config.resolved(), "submission": submission, "takeover": takeover},
        torch_config=WatchingTorchConfig(backend=cluster.process_group, signals=_signals(config)),
        scaling_config=ScalingConfig(
            num_workers=(cluster.fewest_workers, cluster.workers) if cluster.min_workers else cluster.workers,
            elastic_resize_monitor_interval_s=cluster.resize_check_s,
            use_gpu=cluster.gpus_per_worker > 0,
            resources_per_worker=resources,
        ),
        run_config=RunConfig(
            # Ray reads the state that it finds under a name it knows, and dies if that was cut off.
            name=f"{config.run.name}-{submission[:12]}-{number:02d}",
            storage_path=f"{config.run.folder}/ray",
            failure_config=FailureConfig(
                max_failures=cluster.max_failures, max_preemption_failures=cluster.max_preemption_failures
            ),
            callbacks=[
                FailureNotes(config.run.folder, submission),
                GroupGuard(config.run.name, config.run.storage_root, cluster.reschedule_wait_s),
            ],
        ),
    )


def _signals(config: Config) -> tuple[str, ...]:
    """Without a session nothing could be saved: then a signal ends a worker as it always did."""
    return config.checkpoint.settings.preemption_signals if config.checkpoint.method == "layercheck" else ()


def _fault_plan(config: Config) -> FaultPlan:
    return FaultPlan.parse(list(config.faults.kill), config.run.storage_root, config.run.name)


# ---------------------------------------------------------------- one worker


def worker(arguments: dict[str, Any]) -> dict[str, Any]:
    """The train function of Ray Train: one life of one rank.

    Returns:
        A TrainResult as a dict. An error that a restart would meet again is a result as well, since Ray
        restarts whatever raises.
    """
    context = ray.train.get_context()
    config, submission = parse(arguments["config"]), arguments["submission"]
    rank = context.get_world_rank()
    _prepare_process(config)
    from app.train_loop import train  # imports deepspeed, which must see the prepared extensions

    coordinator, vaults = None, None
    drains = Drains(config.checkpoint.settings.preemption_grace_s)
    if config.checkpoint.method == "layercheck":
        place = (config.run.name, config.run.storage_root, config.checkpoint.settings)
        coordinator = connect(*place)
        vaults = RayVaults(*place) if config.checkpoint.settings.memory.enabled else None
    try:
        result = train(
            config,
            rank=rank,
            world_size=context.get_world_size(),
            coordinator=coordinator,
            submission=submission,
            takeover=arguments["takeover"],
            vaults=vaults,
            reporter=ray.train.report,
            publisher=_hand_over,
            faults=_fault_plan(config),
            drains=drains,
            witness=Witness.of(config.faults.witness, rank),
        )
    except LayerCheckError as error:
        if error.retry_may_help:
            raise
        result = TrainResult("refused", message=str(error))
    if result.status == "preempted":
        _leave(config, drains)
    return asdict(result)


def _hand_over(folder: Path | None, metrics: dict[str, Any]) -> None:
    """The trained model as the run's last Checkpoint: Ray copies it to its storage path. A barrier."""
    ray.train.report(metrics, checkpoint=Checkpoint.from_directory(folder) if folder is not None else None)


def _leave(config: Config, drains: Drains) -> None:
    """After a last save: raises where Ray is to restart the group, returns where the run is to end.

    All ranks were told alike of a drain, and each of them may have got the signal: all go the same way.
    """
    if drains.announced:
        drains.hold()
    if config.cluster.on_signal == "restart":
        raise PreemptedError("a signal announced the end of a worker; all was saved (cluster.on_signal)")


def _prepare_process(config: Config) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s", force=True)
    logging.getLogger("app").setLevel(logging.INFO)
    # DeepSpeed calls what torch has renamed, some hundred times a step.
    warnings.filterwarnings(
        "ignore", message=r".*`torch\.distributed\.\w+` is deprecated", category=FutureWarning
    )
    os.environ |= prepare_extensions(config.run.folder)
