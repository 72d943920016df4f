"""Opens ONNX Runtime sessions for a model's graph, and keeps graphs on disk, with weights packed for this CPU.

The second start of a model maps that file into memory: it builds no graph, rearranges no weights and repeats no checks,
and the model's sessions share one copy of its weights. Knows files, threads and cores; knows nothing of models.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import shutil
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import onnxruntime as ort

from outrider.engine.ort import exact_biases
from outrider.protocol.digest import cache_folder, make_cached, model_digest, replace_file, use_cached
from outrider.protocol.errors import CacheError, ModelError, first_line
from outrider.protocol.process import cpu_flags, physical_memory
from outrider.protocol.worker_link import ANY_CORE, DRAFTER_CORE_VARIABLE

if TYPE_CHECKING:
    from outrider.engine.ort.graph import Graph

log = logging.getLogger(__name__)

_MIN_WEIGHT_BYTES = 2**22  # graphs of smaller weights are quick to build
_MAX_SHARE_OF_MEMORY, _MAX_SHARE_OF_DISK = 1 / 8, 1 / 6  # of weights: writing a graph takes six and three times as much
_READ_BYTES = 2**22  # read at a time
_SPIN_MICROSECONDS = "100"
"""How long an idle thread spins before it sleeps: longer than one thread's operations between those of all threads, but
not so long that threads keep each other from the cores on a busy machine."""
_TRIAL_PERIOD, _TRIAL_FORWARDS, _NEW_SHARE = 128, 3, 0.3
_GRAPH_FILE, _WEIGHTS_FILE = "graph.onnx", "weights.bin"
_CPU_FLAGS = ("amx_int8", "avx512_vnni", "avx512f", "avx_vnni", "avx2")
SHRINKING_RUN = ort.RunOptions()
"""The options of a run after which the session's arena frees the memory that is not in use."""
SHRINKING_RUN.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
_SAVE_OPTIONS = {
    "session.save_external_prepacked_constant_initializers": "1",
    "session.optimized_model_external_initializers_file_name": _WEIGHTS_FILE,
    "session.optimized_model_external_initializers_min_size_in_bytes": "1024",
}


@dataclass(frozen=True, slots=True)
class Sessions:
    """A model's sessions. `all_cores` also computes on the drafters' core, for forwards while no drafter works; None:
    there is no such core, or the weights would be in memory twice. `exact`: biases are the checkpoint's own
    (`exact_biases`). `cached`: their file."""

    own: Any
    all_cores: Any | None
    exact: bool = False
    cached: CachedGraph | None = None

    @classmethod
    def open(cls, build: Callable[[bool], Graph], cached: CachedGraph | None) -> Sessions:
        """Opens the sessions of a graph, from disk if it is `cached` there, else from `build`, and then keeps it.

        Args:
            build: its argument is `graph.build`'s `exact`.

        Raises:
            ModelError: the graph can't be built, or ONNX Runtime refuses it.
        """
        if cached is not None and cached.acquire():
            try:
                return cls._open_cached(cached)
            except ModelError:
                cached.remove()  # a file is damaged
        if cached is not None and exact_biases.IS_SUPPORTED:
            try:
                if cached.write(build(True)):
                    return cls._open_cached(cached, written=True)
            except ModelError as error:
                log.info("biases are rounded: %s", first_line(error))
                cached.remove()
        made = build(False)
        if cached is not None and cached.write(made):
            return cls._open_cached(cached, written=True)
        size = sum(array.nbytes for array in made.weights.values())
        weights = _to_ort_values(made)
        if size < _MIN_WEIGHT_BYTES:
            return cls._open_all(made.proto, weights)
        return cls(_open_session(made.proto, weights), None)  # each session has its own copy of these weights

    @classmethod
    def _open_cached(cls, cached: CachedGraph, written: bool = False) -> Sessions:
        cached.read_ahead(written)
        sessions = cls._open_all(cached.file)
        return replace(sessions, exact=exact_biases.apply(cached.folder, cached.weights), cached=cached)

    @classmethod
    def _open_all(cls, source: bytes | str, weights: dict[str, Any] | None = None) -> Sessions:
        core = drafter_core()
        return cls(_open_session(source, weights), None if core is None else _open_session(source, weights, core))


class CoreChoice:
    """Decides whether forwards that may use all cores do, by the time that forwards of as many rows took.

    Other programs on the drafters' core can make all cores slower than the target's own. A few forwards of each
    `_TRIAL_PERIOD` use the cores that seem slower, so that a change is noticed.
    """

    def __init__(self) -> None:
        self._ms: dict[tuple[int, bool], float] = {}
        self._forwards = 0

    def use_all(self, rows: int) -> bool:
        """Whether the next forward of `rows` uses all cores."""
        own, of_all = self._ms.get((rows, False)), self._ms.get((rows, True))
        self._forwards += 1
        is_trial = self._forwards % _TRIAL_PERIOD >= _TRIAL_PERIOD - _TRIAL_FORWARDS
        return (own is None or of_all is None or of_all <= own) is not is_trial

    def record(self, rows: int, all_cores: bool, milliseconds: float) -> None:
        """Records what a forward took, alone or on all cores; the newest time counts for `_NEW_SHARE`."""
        known = self._ms.get((rows, all_cores), milliseconds)
        self._ms[rows, all_cores] = known + _NEW_SHARE * (milliseconds - known)


@dataclass(frozen=True, slots=True)
class CachedGraph:
    """A graph in the cache. Its folder's name has a hash of the model's folder and one of what its bits depend on."""

    folder: Path

    @classmethod
    def of(cls, model: Path) -> CachedGraph | None:
        """Returns the cached graph, existing or not, of the model in this folder; None: it is not cached."""
        files = [(file.name, file.stat()) for file in sorted(model.glob("model*.safetensors"))]
        size = sum(stat.st_size for _, stat in files)
        if size < _MIN_WEIGHT_BYTES:
            return None
        code = [file.read_text(encoding="utf-8") for file in sorted(Path(__file__).parent.glob("*.py"))]
        written = [(name, stat.st_size, stat.st_mtime_ns) for name, stat in files]  # the digest samples the weights
        state = json.dumps([model_digest(model), written, code, kernel_name()])
        name = f"{_short_hash(os.fspath(model.resolve()))}.{_short_hash(state)}"
        cached = cls(cache_folder() / "graphs" / name)
        return cached if os.path.exists(cached.weights) or _has_room(size) else None

    @property
    def file(self) -> str:
        return os.fspath(self.folder / _GRAPH_FILE)

    @property
    def weights(self) -> Path:
        return self.folder / _WEIGHTS_FILE

    def acquire(self) -> bool:
        """Locks the folder, so that no process removes it while this one runs. Returns False if it has no graph."""
        return use_cached(self.folder, _GRAPH_FILE)

    def remove(self) -> None:
        """Removes a graph that is damaged or not to be used."""
        shutil.rmtree(self.folder, ignore_errors=True)

    def write(self, graph: Graph) -> bool:
        """Keeps a graph; returns False if it can't be written, because a disk is full for example.

        Raises:
            ModelError: ONNX Runtime refuses it, or its packed weights have no place for its biases.
        """
        try:
            make_cached(self.folder, partial(_write_graph, graph), _GRAPH_FILE)
        except CacheError as error:
            log.info("the model's graph is not kept on disk: %s", first_line(error))
            return False
        return True

    def read_ahead(self, written: bool = False) -> None:
        """Reads the weights into the system's page cache, whose pages become as large as what is read at a time.

        ONNX Runtime writes and maps them in small pieces. Forwards that read small pages take a sixth longer, so what
        was just `written` is dropped from the page cache first.
        """
        with suppress(OSError), open(self.weights, "rb", buffering=0) as file:
            if written and sys.platform == "linux":
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            piece = bytearray(_READ_BYTES)
            while file.readinto(piece):
                pass

    @property
    def _check_file(self) -> Path:
        """The file with the result of the check with as many threads, and +1 if there is a drafters' core."""
        return self.folder / f"checked-{num_threads()}{'+1' if drafter_core() is not None else ''}"

    @property
    def min_rows(self) -> int | None:
        """The number of rows that forwards must have, as found by the check with as many threads and cores; None: there
        was no such check yet."""
        with suppress(OSError, ValueError):
            return int(self._check_file.read_text(encoding="utf-8"))
        return None

    def record_check(self, min_rows: int) -> None:
        """Records that the graph, which this process has acquired, passed the check with this minimum of rows."""
        with suppress(OSError):
            replace_file(self._check_file, str(min_rows))


def _has_room(weight_bytes: int) -> bool:
    """Returns whether this machine can write the graph of weights of this size, and keep it."""
    with suppress(OSError):
        folder = next(path for path in (cache_folder(), *cache_folder().parents) if path.exists())
        free = shutil.disk_usage(folder).free
        return weight_bytes <= min(_MAX_SHARE_OF_MEMORY * physical_memory(), _MAX_SHARE_OF_DISK * free)
    return False


def _write_graph(graph: Graph, folder: Path) -> None:
    cached = CachedGraph(folder)
    options = _make_options(num_threads())
    options.optimized_model_filepath = cached.file
    for key, value in _SAVE_OPTIONS.items():
        options.add_session_config_entry(key, value)
    _create_session(graph.proto, options, _to_ort_values(graph))
    if graph.biases:
        exact_biases.write(Path(cached.file), cached.weights, graph.biases)


def _to_ort_values(graph: Graph) -> dict[str, Any]:
    """Returns a graph's weights for `add_external_initializers`."""
    return {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in graph.weights.items()}


def _open_session(source: bytes | str, weights: dict[str, Any] | None, core: str | None = None) -> Any:
    """Opens a session; with `core` (see `drafter_core`) it has one more thread, on that core."""
    options = _make_options(num_threads() + (core is not None))
    if core not in (None, ANY_CORE):
        options.add_session_config_entry("session.intra_op_thread_affinities", str(int(core) + 1))
    return _create_session(source, options, weights)


def _make_options(count: int) -> Any:
    options = ort.SessionOptions()
    options.intra_op_num_threads = count
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "1" if count > 1 else "0")
    options.add_session_config_entry("session.intra_op.spin_duration_us", _SPIN_MICROSECONDS)
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


def _create_session(source: bytes | str, options: Any, weights: dict[str, Any] | None) -> Any:
    if weights:
        options.add_external_initializers(list(weights), list(weights.values()))
    try:
        return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # its bindings raise classes without a common base
        raise ModelError(f"ONNX Runtime refuses this model's graph: {first_line(error)}") from error


def num_threads() -> int:
    """Returns the number of threads, the same as the BLAS's (`orchestrator.machine.system`)."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdigit() and int(given) > 0 else 1


def drafter_core() -> str | None:
    """Returns the number of the drafters' core, which a target may use while they are idle, or `ANY_CORE`; None: they
    have no core of their own."""
    given = os.environ.get(DRAFTER_CORE_VARIABLE, "")
    return given if given.isdigit() or given == ANY_CORE else None


@cache
def kernel_name() -> str:
    """Returns the name of the kernels on which a quantised forward's bits depend: others may choose another token."""
    instructions = next((flag for flag in _CPU_FLAGS if flag in cpu_flags()), platform.machine())
    return f"int8-onnxruntime-{ort.__version__}-{instructions.replace('_', '-')}"


def rounds_per_token(cached: CachedGraph | None) -> bool:
    """Returns whether a graph rounds per token (`graph.build`) if that is precise enough: on CPUs whose products of
    8-bit integers take hardly longer for several tokens, if it is kept in the cache, because rounding weights again
    takes seconds."""
    return cached is not None and "amx_int8" in cpu_flags()


def _short_hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
