"""Lives of a micro model under GEMINI: one group of processes, a fresh engine for each life."""

from typing import Any

from app.baselines.committer import Committer
from app.baselines.gemini.method import GeminiCopies
from app.baselines.settings import GeminiSettings
from layercheck.errors import ConfigError
from layercheck.zero3 import Zero3Engine
from tests import micro
from tests.integration.gemini_hosts import SocketHosts
from tests.integration.gemini_ranks import _end as end_hosts
from tests.integration.methods import open_method, state_of

STORAGE_EVERY = 3


def make(zero3: Zero3Engine, committer: Committer, folder: str, where: str) -> GeminiCopies:
    settings = GeminiSettings(storage_every=STORAGE_EVERY, chunk_bytes=4096, wait_s=20)
    return GeminiCopies(zero3, committer, SocketHosts(folder, where[zero3.rank]), settings)


def uninterrupted(steps: int) -> tuple[dict[int, float], dict[str, Any]]:
    """Losses and the last state of a run that saves nothing."""
    engine = micro.build(0)
    losses = {step: micro.train_step(engine, step) for step in range(1, steps + 1)}
    return losses, state_of(Zero3Engine(engine))


def life(run: str, folder: str, where: str, until: int, seed: int, last: bool = False) -> dict[str, Any]:
    """Trains until this step, with rank r on the host `where[r]`; then all processes are as if dead."""
    engine = micro.build(seed)
    session = open_method(engine, run, lambda *parts: make(*parts, folder, where))
    method: Any = session.method
    point = session.resume()
    losses, reports = {}, []
    for step in range(point.step, until + 1):
        losses[step] = micro.train_step(engine, step)
        reports.append(session.after_step(step, {"loss": losses[step]}))
    method._replicator.wait()
    method._books.note(method._background.wait())
    if last:
        session.save_now({"loss": losses[until]})
    told = {
        "first": point.step,
        "source": point.receipt and point.receipt.source,  # type: ignore[attr-defined]
        "losses": losses,
        "state": state_of(method._zero3),
        "written_at": [report.step for report in reports if report.bytes_written],
        "alerts": [alert for report in reports for alert in report.alerts],
    }
    session.close("completed" if last else "failed")
    return {**told, "costs": session.costs(), "hosts": sorted(SocketHosts(folder, where[0]).living())}


def story(tmp: str, folder: str) -> dict[str, Any]:
    """All that a run may lose, one after the other."""
    run = f"{tmp}/run"
    told: dict[str, Any] = {"reference": uninterrupted(10)}
    told["first"] = life(run, folder, "ab", 4, seed=0)
    told["trainers died"] = life(run, folder, "ab", 5, seed=1)
    end_hosts(folder, b"", "b")
    told["host b died"] = life(run, folder, "ac", 8, seed=2)
    end_hosts(folder, b"", "a", "c")
    told["refused"] = refused(f"{tmp}/refused", folder)
    told["both hosts died"] = life(run, folder, "de", 10, seed=3, last=True)
    return told


def refused(run: str, folder: str) -> str:
    """One host has too little memory: all ranks are told, before anything is copied."""
    engine = micro.build(0)
    session = open_method(engine, run, lambda *parts: make(*parts, folder, "fg"))
    method: Any = session.method
    session.resume()
    if method._zero3.rank == 0:

        def too_little() -> None:
            raise ConfigError("host f has too little memory")

        method._boxes = too_little
    micro.train_step(engine, 1)
    try:
        session.after_step(1, {"loss": 1.0})
    except ConfigError as error:
        return str(error)
    finally:
        session.close("failed")
    return "went on"
