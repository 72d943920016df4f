"""A local cluster: starts `python -m outrider serve` as a process, waits until it is ready, and ends it.

The server ends when this process ends, for whatever reason. Knows nothing of workers.
"""

from __future__ import annotations

import math
import signal
import socket
import subprocess
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Unpack

from outrider.orchestrator.client.client import AsyncClient, Client
from outrider.orchestrator.events import Announcement, Failure, ServerReady, Stage, Unfinished, announcements
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.settings import Settings, flags, settings_from
from outrider.protocol import values
from outrider.protocol.errors import ServerStopped, WorkerError, as_error

END_SECONDS = 12.0


class LocalCluster:
    """Orchestrator, target worker and draft workers on this machine, from creation to `close`; a context manager.

    `progress` is called with each stage of the start. All settings are keywords, named like the flags of `outrider
    serve`; defaults follow the names:

    - `model`, `draft_model` None: Hugging Face ids, folders or GGUF files; both None: SmolLM2 (docs/models.md).
      `gguf_keep_precision` False: blocks of a GGUF file that MLX has no format for are quantized again; True keeps them
      in half precision.
    - `draft_backend` "mlx": what drafts: mlx, coreml, replay, ngram, none, a head in the target's process (dflash,
      eagle3, redrafter or mtp), or auto, by the kind of `draft_model`. `replay`: the replay drafter's script.
    - `head`: heads that also draft, in the target's process: one or several ids or folders, "mtp" or "early-exit" for
      the model's own; heads that can't be used are left out with a note.
    - `drafters` 1: draft processes, which share a round's outcomes.
    - `draft_prefill` "auto": what reads prompts for a drafter on MLX: auto, mlx, coreml, or a package's folder.
    - `draft_device` "auto": the device of draft workers on MLX: auto, the target's, or cpu.
    - `mode` "auto": ar, sd, ssd, or auto for the fastest as measured; a request may choose another.
    - `num_draft_tokens`, `branches` None: tokens of a chain (K), outcomes prepared in a round (B); None: 4 and 16, or
      with mode auto what `outrider tune` found.
    - `head_in` "target": the process that a head drafts in: target, or draft-worker, where it works ahead.
    - `fan_out` "best-first": how outcomes are chosen: best-first, geometric or uniform.
    - `branch_depth` "auto": "full" waits until branches are K tokens deep.
    - `ngrams` True: copy drafts from earlier text where the drafter has none.
    - `trees` False: True verifies several drafts at once, as a tree, where that pays and the target can.
    - `colocate` False: True drafts in the target's process, in turn with verifying.
    - `shards` 1: ranks of the target on this machine, each with a part of each layer.
    - `await_target` False: True starts no target, and waits for one to join (`outrider worker target`).
    - `endpoint` None: where clients connect, ipc://PATH or tcp://HOST:PORT; None: a new socket.
    - `threads` 1: threads of each worker for matrix products. `cpu_kernels` "auto": what computes on a CPU: mlx, or
      auto for ONNX Runtime where it serves the model. `pin_cores` True: on a machine of two cores, target and drafter
      have one each. `max_active` None: requests in flight at once; None: as many as fit in memory, at most 16.
    - `kv_memory` None: memory for keys and values in all workers, in bytes or like "2GB"; None: by the machine.
    - `prompt_cache` True: keep the keys and values of ended texts, for texts with the same beginning.
    - `memory` True: mode auto loads and saves what it learned about this pair on this machine.
    - `max_waiting` 256: requests that may wait. `worker_timeout` 10: seconds of silence until a worker is lost.
    - `workers_endpoint` None: where drafters of other machines join, tcp://HOST:PORT. `keys`: the folder of your keys;
      None: that of `outrider keys`. `keyed` False: True requires keys also on endpoints of this machine only.
      `advertise` False: True announces `workers_endpoint` on the local network.
    - `prefill_workers` 0: processes that read prompts of `prefill_from` tokens and more (None: what tune found, else
      512) instead of the target; `prefill_backend` "mlx" or "coreml".
    - `trace`: a file for a timeline. `simulate`: a latency profile to imitate. `log_level` "warning".
    - `log_format` "text", or "json" for one object per line on stderr, from every process.

    Raises:
        OutriderError: the cluster can't start; the class and message say why.
    """

    def __init__(self, *, progress: Callable[[str], None] | None = None, **settings: Unpack[Settings]) -> None:
        if not settings.keys() <= Settings.__annotations__.keys():
            raise values.unknown_keyword("LocalCluster", settings, (*Settings.__annotations__, "progress"))
        checked = settings_from(settings)
        self._models = (
            " and ".join(str(name) for name in (checked.model, checked.draft_model) if name) or "the default model"
        )
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python("-m", "outrider", "serve", "--no-http", *flags(checked), "--parent-fd", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C goes to this process only, which ends the server in order
            )
        try:
            ready = self._wait_until_ready(progress)
        except BaseException:
            self._end()
            raise
        self.endpoint = ready.endpoint
        self.workers_endpoint = ready.workers
        self.joining_endpoint = ready.joining
        self.own_endpoint = ready.own
        self.notes = ready.notes

    def __repr__(self) -> str:
        code = self._process.poll()
        state = f"at {self.own_endpoint}, pid {self.pid}" if code is None else "ended"
        return f"<LocalCluster of {self._models}, {state}>"

    @property
    def pid(self) -> int:
        """The orchestrator's process id."""
        return self._process.pid

    def client(self, timeout: float = math.inf) -> Client:
        """Returns a client that notices at once when the server has ended.

        `timeout`: seconds that the server may be silent; inf: as long as its process lives, on however busy a machine.
        """
        return Client(self.own_endpoint, timeout, self._check)

    def async_client(self, timeout: float = math.inf) -> AsyncClient:
        """Returns the same client for asyncio."""
        return AsyncClient(self.own_endpoint, timeout, self._check)

    def wait(self) -> int:
        """Waits until the server has ended; returns its exit code, negative for the signal that ended it."""
        return self._process.wait()

    def close(self) -> None:
        """Ends the server and its workers, in order if possible. A second call does nothing.

        Raises:
            OutriderError: something could not be finished, such as a trace on a full disk; the server has ended.
        """
        unfinished = self._end()
        if unfinished is not None:
            raise as_error(unfinished.kind, unfinished.message)

    def _end(self) -> Unfinished | None:
        """Shuts the socket down for writing, which ends the server, and reads its last announcements."""
        if self._line.fileno() < 0:
            return None
        received: list[Announcement] = []
        with self._line, suppress(OSError):
            self._line.settimeout(END_SECONDS)
            self._line.shutdown(socket.SHUT_WR)
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)  # for a server that does not yet read the socket
            received += announcements(self._line)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return next((last for last in received if isinstance(last, Unfinished)), None)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()  # without raising: the error in flight is the one to report

    def _wait_until_ready(self, progress: Callable[[str], None] | None) -> ServerReady:
        for announcement in announcements(self._line):
            match announcement:
                case ServerReady():
                    return announcement
                case Failure(kind=kind, message=message):
                    raise as_error(kind, message)
                case Stage(text=text) if progress is not None:
                    progress(text)
        code = self._process.wait()
        raise WorkerError(f"the server exited with code {code} before it was ready; see its stderr")

    def _check(self) -> None:
        code = self._process.poll()
        if code is not None:
            how = f"died (signal {-code})" if code < 0 else f"ended with code {code}"
            raise ServerStopped(f"the server {how} during this request; start it again")
