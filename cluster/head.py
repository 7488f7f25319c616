"""A private Ray head and further nodes of it: own ports, own temporary folder, own token, own process groups.

They join no other cluster of the machine and no other cluster's commands reach them; each is ended by its
process group alone, never by `ray stop`, which would end every cluster of the host.
"""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

from layercheck.errors import LayerCheckError

_NODE_PORT_FLAGS = (
    "--node-manager-port",
    "--object-manager-port",
    "--dashboard-agent-listen-port",
    "--dashboard-agent-grpc-port",
    "--metrics-export-port",
    "--runtime-env-agent-port",
)
_HEAD_PORT_FLAGS = ("--port", "--ray-client-server-port", "--dashboard-port", *_NODE_PORT_FLAGS)
_NUM_WORKER_PORTS = 60
_POLITE_S = 8.0
_STOP_S = 15.0
_MARK = "LAYERCHECK_HEAD"


class HeadError(LayerCheckError):
    """The head did not start, or ended by itself."""


@dataclass
class PrivateNode:
    """One node and all processes on it; also a context manager that stops it.

    Attributes:
        folder: private folder of this node; removed at the end.
        process: `ray start --block`.
    """

    folder: Path
    process: subprocess.Popen[bytes] = field(repr=False)

    @property
    def log(self) -> Path:
        """What `ray start` printed."""
        return self.folder / "ray.log"

    def stop(self) -> None:
        """Ends every process of the node, then removes its folder."""
        self._check_ended(_end(self))

    def kill(self) -> None:
        """SIGKILL to every process at once, as when a machine is lost, then removes the folder."""
        self._check_ended(_kill_all(self))

    def _check_ended(self, ended: bool) -> None:
        if not ended:
            raise HeadError(f"processes of the node {self.process.pid} do not end: {self.members()}")
        shutil.rmtree(self.folder, ignore_errors=True)

    def members(self) -> list[int]:
        """Living processes of the node: its process group, and job drivers, which make own groups."""
        return _members(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


@dataclass
class PrivateHead(PrivateNode):
    """A head started by `start_head`. Its folder also holds the token and Ray's own folder.

    Attributes:
        address: `127.0.0.1:port`, for `ray.init(address=...)` and RAY_ADDRESS.
        dashboard: `http://127.0.0.1:port`, for job submission.
    """

    address: str
    dashboard: str

    @property
    def env(self) -> dict[str, str]:
        """Variables that a client of this head needs."""
        return {"RAY_ADDRESS": self.address, **_auth_env(self.folder)}

    @property
    def client_env(self) -> dict[str, str]:
        """The whole environment of a client: this process's, without what belongs to another cluster."""
        return {**_clean_env(), **self.env}


def start_head(
    num_cpus: int | None = None, ready_s: float = 90, env: dict[str, str] | None = None
) -> PrivateHead:
    """Starts a head and waits until its dashboard and its job server answer.

    Args:
        num_cpus: CPUs that the head offers; may be more than the machine has.
        ready_s: limit in seconds.
        env: further variables for the head and all its workers.

    Raises:
        HeadError: it ended or did not answer in time; the end of its log is in the message.
    """
    return _with_retries(lambda: _start_once(num_cpus, ready_s, env or {}))


def start_node(head: PrivateHead, num_cpus: int, ready_s: float = 60) -> PrivateNode:
    """Starts one more node of a head's cluster on this machine. Stop it before the head.

    Raises:
        HeadError: it ended or did not come up in time.
    """
    return _with_retries(lambda: _start_node_once(head, num_cpus, ready_s))


Started = TypeVar("Started", bound=PrivateNode)


def _with_retries(start: Callable[[], Started]) -> Started:
    for tries_left in (2, 1, 0):
        try:
            return start()
        except HeadError as error:
            # Between the search for free ports and the start somebody else may have taken one.
            if not (error.facts.get("ended") and tries_left):
                raise
    raise AssertionError("unreachable")


def _start_node_once(head: PrivateHead, num_cpus: int, ready_s: float) -> PrivateNode:
    folder = Path(tempfile.mkdtemp(prefix="lc-", dir="/tmp"))
    command = [*_START, "--address", head.address, *_port_arguments(_NODE_PORT_FLAGS)]
    process = _launch([*command, "--num-cpus", str(num_cpus)], folder, {**head.env, _MARK: str(folder)})
    node = PrivateNode(folder=folder, process=process)
    _ready_or_stop(node, lambda: True, ready_s)
    return node


def _start_once(num_cpus: int | None, ready_s: float, env: dict[str, str]) -> PrivateHead:
    # Short: a socket path below it must stay under 108 characters.
    folder = Path(tempfile.mkdtemp(prefix="lc-", dir="/tmp"))
    # Not the folder itself: Ray opens its temporary folder to everybody (mode 0777), and with it the token.
    (folder / "r").mkdir()
    _write_token(folder)
    ports = dict(zip(_HEAD_PORT_FLAGS, _free_ports(len(_HEAD_PORT_FLAGS)), strict=True))
    address = f"127.0.0.1:{ports['--port']}"
    # The workers need the address too: parts of Ray Train look for a cluster by themselves and give up, or
    # find a foreign one, where the machine has several.
    own = {"RAY_ADDRESS": address, **_auth_env(folder), _MARK: str(folder)}
    process = _launch(_command(folder, ports, num_cpus), folder, {**env, **own})
    head = PrivateHead(
        address=address,
        dashboard=f"http://127.0.0.1:{ports['--dashboard-port']}",
        folder=folder,
        process=process,
    )
    token = (folder / "token").read_text()
    _ready_or_stop(head, lambda: _answers(f"{head.dashboard}/api/jobs/", token), ready_s)
    return head


_RAY = (sys.executable, "-m", "ray.scripts.scripts")
_START = (*_RAY, "start", "--block", "--disable-usage-stats", "--node-ip-address", "127.0.0.1")


def _command(folder: Path, ports: dict[str, int], num_cpus: int | None) -> list[str]:
    command = [*_START, "--head", "--dashboard-host", "127.0.0.1", "--include-dashboard", "true"]
    command += ["--temp-dir", str(folder / "r"), *_worker_ports()]
    for flag, port in ports.items():
        command += [flag, str(port)]
    return command + (["--num-cpus", str(num_cpus)] if num_cpus is not None else [])


def _launch(command: Sequence[str], folder: Path, env: dict[str, str]) -> subprocess.Popen[bytes]:
    with open(folder / "ray.log", "wb") as log:
        return subprocess.Popen(
            command,
            env={**_clean_env(), **env},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def _ready_or_stop(node: PrivateNode, answers: Callable[[], bool], ready_s: float) -> None:
    try:
        _wait_ready(node, answers, ready_s)
    except BaseException:
        node.stop()
        raise


def _clean_env() -> dict[str, str]:
    """This process's variables without those that would make the head join or trust another cluster."""
    env = {key: text for key, text in os.environ.items() if not key.startswith(("RAY_ADDRESS", "RAY_AUTH_"))}
    # Jobs start as `python -m ...`: that must be this interpreter, also where no environment is activated.
    return {**env, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', os.defpath)}"}


def _auth_env(folder: Path) -> dict[str, str]:
    return {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(folder / "token")}


def _write_token(folder: Path) -> None:
    # mkdtemp made the folder with mode 0700; the file is 0600 from its first instant.
    fd = os.open(folder / "token", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    os.write(fd, secrets.token_hex(32).encode())
    os.close(fd)


def _port_arguments(flags: Sequence[str]) -> list[str]:
    pairs = zip(flags, _free_ports(len(flags)), strict=True)
    return [text for flag, port in pairs for text in (flag, str(port))] + _worker_ports()


def _worker_ports() -> list[str]:
    low = _free_range(_NUM_WORKER_PORTS)
    return ["--min-worker-port", str(low), "--max-worker-port", str(low + _NUM_WORKER_PORTS - 1)]


def _free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until the last is known, so that they differ."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for sock in sockets:
            sock.bind(("", 0))
        return [int(sock.getsockname()[1]) for sock in sockets]
    finally:
        for sock in sockets:
            sock.close()


def _free_range(count: int) -> int:
    """First port of `count` neighbouring free ports below the range that the kernel hands out by itself."""
    start = 20000 + secrets.randbelow(100) * 100
    for low in chain(range(start, 30000, 100), range(20000, start, 100)):
        if all(_is_free(port) for port in range(low, low + count)):
            return low
    raise HeadError(f"no {count} neighbouring free ports between 20000 and 30000")


def _is_free(port: int) -> bool:
    with socket.socket() as sock:
        try:
            sock.bind(("", port))  # any address: Ray listens on the machine's own, not on 127.0.0.1
        except OSError:
            return False
        return True


def _wait_ready(node: PrivateNode, answers: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while True:
        if node.process.poll() is not None:
            code = node.process.returncode
            raise HeadError(f"the Ray node ended with code {code}:\n{_tail(node.log)}", ended=True)
        if b"Ray runtime started" in node.log.read_bytes() and answers():
            return
        if time.monotonic() > deadline:
            raise HeadError(f"the Ray node was not ready within {limit_s:g} s:\n{_tail(node.log)}")
        time.sleep(0.2)


def _answers(url: str, token: str) -> bool:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=2) as reply:
            return bool(reply.status == 200)
    except (urllib.error.URLError, TimeoutError, ConnectionError):
        return False


def _tail(path: Path, num_chars: int = 2000) -> str:
    return path.read_text(errors="replace")[-num_chars:]


def _end(node: PrivateNode) -> bool:
    """SIGTERM to the leader, then SIGKILL to all that it started; True once nobody of it is left."""
    node.process.terminate()  # the leader alone: it ends its children in an order that lets the raylet go
    deadline = time.monotonic() + _POLITE_S
    while time.monotonic() < deadline:
        node.process.poll()
        if not _members(node):
            return True
        time.sleep(0.1)
    return _kill_all(node)


def _kill_all(node: PrivateNode) -> bool:
    """SIGKILL until nobody is left: those that die last may still have started others."""
    deadline = time.monotonic() + _STOP_S
    while members := _members(node):
        for pid in members:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
        node.process.poll()
    return True


def _members(node: PrivateNode) -> list[int]:
    mark = f"{_MARK}={node.folder}".encode()
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, group, *_ = (folder / "stat").read_text().rpartition(")")[2].split()
            ours = int(group) == node.process.pid or mark in (folder / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # gone meanwhile, or another user's
        if ours and state not in "ZX":
            found.append(int(folder.name))
    return found
