"""Ray on this host, as `outrider fleet` starts it: resources, processes and the token. Does not import Ray.

A running process is recorded in a file, with its start time, so that later commands find it. The token gives full
control of every host, so its file must be readable only by its owner.
"""

from __future__ import annotations

import json
import os
import platform
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from outrider import __version__
from outrider.orchestrator.machine.spawn import child_environment
from outrider.protocol import keys, values
from outrider.protocol.digest import replace_file
from outrider.protocol.endpoints import Tcp, is_local, listen_error
from outrider.protocol.errors import EndpointError, InvalidRequest, KeyFault

MAX_AMOUNT = 1_000_000
MAC_RESOURCES = ("metal", "ane")
"""A Mac has one of each, which several engines may share."""
RAY_NAMES = {"metal": "metal", "ane": "ane", "cuda": "GPU", "cpu": "CPU", "memory": "memory"}
"""Ray's names of our resources."""

DEFAULT_PORT = 6379
STARTED_MESSAGE = "Ray runtime started."
START_TIMEOUT_SECONDS = 180.0
STOP_TIMEOUT_SECONDS = 30.0
NO_DASHBOARD_FLAG = "--include-dashboard=false"
"""Used when a head restarts: with the dashboard, the raylet's agents start too late, and the raylet ends after 15 s."""

RAY_PORTS = range(10_001, 20_000)
"""Ports of Ray's client server and workers."""

VERSION_LABEL = "outrider"
"""The node label with the host's Outrider version."""

TOKEN_FILE = "token"
TOKEN_BYTES = 32


@dataclass(frozen=True, slots=True)
class Resources:
    """Resources of a host: shares of its Metal GPU and Neural Engine, NVIDIA GPUs, CPU cores, bytes of memory.

    Raises:
        InvalidRequest: a value is out of range, or no host has this combination.
    """

    metal: float = values.float_field(0, 0, 1)
    ane: float = values.float_field(0, 0, 1)
    cuda: float = values.float_field(0, 0, MAX_AMOUNT)
    cpu: float = values.float_field(0, 0, MAX_AMOUNT)
    memory: int = values.checked_field(0, lambda name, value: 0 if value == 0 else values.check_size(name, value))

    def __post_init__(self) -> None:
        values.check_fields(self)
        if self.cuda > 1 and self.cuda != int(self.cuda):
            raise InvalidRequest(f"cuda is {self.cuda:g}; expected a whole number of GPUs, or a fraction below 1")
        if self.cuda and (self.metal or self.ane):
            raise InvalidRequest("cuda can't be combined with metal or ane, which only Macs have; choose one")

    def as_ray(self) -> dict[str, float]:
        """Returns the non-zero resources by Ray's names, as in a bundle."""
        return {RAY_NAMES[name]: many for name, many in asdict(self).items() if many}

    def __str__(self) -> str:
        return format_resources(asdict(self))


def format_resources(amounts: Mapping[str, float]) -> str:
    """Formats resources by our names."""
    some = [(name, many) for name, many in amounts.items() if many]
    words = (f"{name} {many / 2**30:.1f} GiB" if name == "memory" else f"{name} {many:g}" for name, many in some)
    return ", ".join(words) or "nothing"


def host_resources() -> Resources:
    """Returns this host's resources."""
    apple = int(sys.platform == "darwin" and platform.machine() == "arm64")
    devices = Path("/dev").iterdir() if sys.platform == "linux" else ()
    cuda = sum(re.fullmatch(r"nvidia\d+", device.name) is not None for device in devices)
    return Resources(apple, apple, cuda, os.cpu_count() or 1, psutil.virtual_memory().total)


def undetected_resources(host: Resources) -> dict[str, float]:
    """Returns the resources that Ray does not detect: `metal` and `ane`, which are our names."""
    return {name: many for name, many in host.as_ray().items() if name in MAC_RESOURCES}


def start_time(process: psutil.Process) -> float:
    """Returns when a process began; on Linux since the boot, because psutil adds a time that the clock changes."""
    return round(process.create_time() - (psutil.boot_time() if sys.platform == "linux" else 0), 2)


@dataclass(frozen=True, slots=True)
class HostProcess:
    """A running Ray process: whether it is the `head`, the fleet's address, its pid and `start_time`."""

    head: bool
    address: str
    pid: int
    began: float

    def process(self) -> psutil.Process | None:
        """Returns the process; None if it has ended."""
        with suppress(psutil.Error):
            process = psutil.Process(self.pid)
            if start_time(process) == self.began and process.status() != psutil.STATUS_ZOMBIE:
                return process
        return None


class FleetHost:
    """This host's part in a fleet, recorded in `folder`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "ray.log"
        self._file = folder / "running.json"
        self._storage = folder / "gcs"

    def running(self) -> HostProcess | None:
        """Returns the process that runs now, if any."""
        found = self._saved()
        return found if found is not None and found.process() is not None else None

    def was_head_of(self, address: str) -> bool:
        """Returns whether this host was the head of a fleet at `address` that crashed and was not shut down."""
        found = self._saved()
        return found is not None and found.head and found.address == address and self._storage.is_dir()

    def _saved(self) -> HostProcess | None:
        try:
            return HostProcess(**json.loads(self._file.read_text(encoding="utf-8")))
        except (OSError, ValueError, TypeError):
            return None

    def require_not_running(self) -> None:
        """Raises InvalidRequest if a fleet process runs here."""
        here = self.running()
        if here is not None:
            what = "is already the head of the fleet" if here.head else "has already joined the fleet"
            raise InvalidRequest(
                f"this host {what} at {here.address} (process {here.pid}); run `outrider fleet down` first"
            )

    def environment(self, address: str, token: Path) -> dict[str, str]:
        """Returns the environment of Ray processes, and of commands that connect to them."""
        ours = {
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN_PATH": str(token),
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_gcs_storage": "rocksdb",
            "RAY_gcs_storage_path": str(self._storage),
            "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": str(int(not is_loopback(address))),
        }
        return {**child_environment(), **ours}

    def start_head(self, ip: str, port: int, offers: Resources, token: Path) -> HostProcess:
        """Starts Ray as the head of a new fleet, or of the fleet whose head it was before a crash.

        Raises:
            OutriderError: it can't be started; the message has the reason.
        """
        again = self.was_head_of(f"{ip}:{port}")
        if not again:
            self.forget()
        self._storage.mkdir(mode=0o700, parents=True, exist_ok=True)
        where = ["--head", f"--node-ip-address={ip}", f"--port={port}", "--disable-usage-stats"]
        dashboard = NO_DASHBOARD_FLAG if again else "--dashboard-host=127.0.0.1"
        return self._start(True, f"{ip}:{port}", [*where, dashboard], offers, token)

    def start_member(self, address: str, ip: str | None, offers: Resources, token: Path) -> HostProcess:
        """Starts Ray as a member of the fleet at `address`. Raises the same errors as `start_head`."""
        where = [f"--address={address}", *([f"--node-ip-address={ip}"] if ip is not None else [])]
        return self._start(False, address, where, offers, token)

    def _start(self, head: bool, address: str, where: list[str], offers: Resources, token: Path) -> HostProcess:
        line = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", *where]
        line += [
            f"--resources={json.dumps(undetected_resources(offers))}",
            f"--labels={VERSION_LABEL}={__version__}",
        ]
        with self.log.open("wb") as log:
            process = subprocess.Popen(
                line,
                env=self.environment(address, token),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        running = HostProcess(head, address, process.pid, start_time(psutil.Process(process.pid)))
        try:
            self._wait_until_started(process)
        except BaseException:
            end_process(running)
            raise
        self.keep(running)
        return running

    def keep(self, running: HostProcess) -> None:
        """Records the running process."""
        self._file.write_text(json.dumps(asdict(running)), encoding="utf-8")

    def _wait_until_started(self, process: subprocess.Popen[bytes]) -> None:
        until = time.monotonic() + START_TIMEOUT_SECONDS
        while STARTED_MESSAGE not in self._log_text():
            if process.poll() is not None:
                lines = [line.strip() for line in self._log_text().splitlines() if line.strip(" -")]
                errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception): ", line)]
                last = (errors or lines or ["its log is empty"])[-1][:300]
                raise EndpointError(f"Ray ended before it had started: {last} (full log: {self.log})")
            if time.monotonic() > until:
                raise EndpointError(f"Ray has not started in {START_TIMEOUT_SECONDS:g} s; see {self.log}")
            time.sleep(0.1)

    def _log_text(self) -> str:
        return re.sub(r"\x1b\[[0-9;]*m", "", self.log.read_text(encoding="utf-8", errors="replace"))

    def forget(self) -> None:
        """Removes the records of a fleet that was shut down."""
        self._file.unlink(missing_ok=True)
        shutil.rmtree(self._storage, ignore_errors=True)


def end_process(running: HostProcess, show: Callable[[str], None] = lambda _: None) -> None:
    """Ends a process that was started here, and its children."""
    process = running.process()
    if process is None:
        return
    family = [process, *process.children(recursive=True)]
    show(f"ending Ray here (process {running.pid} and {len(family) - 1} of its own)")
    process.terminate()
    _, left = psutil.wait_procs(family, STOP_TIMEOUT_SECONDS)
    for one in left:
        with suppress(psutil.Error):  # ended meanwhile
            one.kill()
    psutil.wait_procs(left, STOP_TIMEOUT_SECONDS)


def require_free(ip: str, port: int) -> None:
    """Raises EndpointError if this host can't listen there."""
    try:
        socket.create_server((ip, port)).close()
    except OSError as error:
        raise listen_error(Tcp(ip, port), error) from None


def check_port(port: int) -> None:
    """Raises InvalidRequest for a port that Ray uses itself."""
    if not 1 <= port <= 65535 or port in RAY_PORTS:
        raise InvalidRequest(f"port is {port}; expected 1 to 65535 except 10001 to 19999, which Ray's workers use")


def is_loopback(address: str) -> bool:
    """Returns whether HOST:PORT is reachable only from this host."""
    return is_local(Tcp(address.rpartition(":")[0].strip("[]"), 0))


def set_ray_environment(environment: Mapping[str, str]) -> None:
    """Sets Ray's environment variables; call it before importing Ray."""
    os.environ.update({name: value for name, value in environment.items() if name.startswith("RAY_")})


def default_folder() -> Path:
    """Returns the folder for a fleet's token and records."""
    return keys.default_folder().with_name("fleet")


def create_token(folder: Path) -> Path:
    """Returns the token's file, and creates it if needed. Raises KeyFault if that fails, or others can read it."""
    file = folder / TOKEN_FILE
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not file.exists():
            replace_file(file, secrets.token_hex(TOKEN_BYTES), 0o600)
    except OSError as error:
        raise KeyFault(f"{file} can't be written ({error.strerror}); expected a folder of your own") from None
    return read_token(folder)


def read_token(folder: Path) -> Path:
    """Returns the token's file. Raises KeyFault if there is none, or others can read it."""
    file = folder / TOKEN_FILE
    try:
        keys.check_private(file, "600", "token", "--folder")
        empty = not file.read_text(encoding="ascii").strip()
    except FileNotFoundError:
        raise KeyFault(f"{file} does not exist; expected a copy of the head's token") from None
    except (OSError, UnicodeDecodeError) as error:
        raise KeyFault(f"{file} can't be read ({error}); expected a copy of the head's token") from None
    if empty:
        raise KeyFault(f"{file} is empty; expected a copy of the head's token")
    return file
