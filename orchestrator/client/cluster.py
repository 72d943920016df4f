"""A cluster of one's own: starts `python -m outrider serve` as a process, waits until it is ready, ends it.

The server ends with this process, however this process ends. Knows nothing of workers.
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
    """Target worker, draft worker and orchestrator on this machine, from creation to `close`; a context manager.

    `progress` hears the stages of the start. All settings are keywords, and flags of `outrider serve` by these names:

    - `model`, `draft_model`: Hugging Face ids, folders or GGUF files; neither: SmolLM2 (docs/models.md).
      `gguf_keep_precision` False: blocks of a GGUF file that MLX has no form for are quantized anew; True keeps them
      in half precision.
    - `draft_backend` "mlx": who drafts: mlx, coreml, replay, dflash, eagle3, redrafter or mtp (heads in the target's
      process), ngram, none, or auto: what `draft_model` is. `replay`: the replay drafter's script.
    - `head`: heads that draft beside them in the target's process: one or several ids or folders, "mtp" or
      "early-exit" for the model's own; what can't be used is left out with a note.
    - `drafters` 1: processes that draft and share a round's outcomes.
    - `draft_prefill` "auto": who reads prompts for a drafter on MLX: auto, mlx, coreml, or a package's folder.
    - `draft_device` "auto": where draft workers on MLX compute: where the target does, or cpu, beside a GPU.
    - `mode` "auto": ar, sd, ssd, or what is measured to be fastest; a request may ask for another.
    - `num_draft_tokens`, `branches`: tokens of a chain (K), outcomes prepared for in a round (B); None: 4 and 16, or
      with mode auto what `outrider tune` found.
    - `head_in` "target": the process that a head drafts in: target, or draft-worker, where it works ahead.
    - `fan_out` "best-first": how outcomes are chosen: best-first, geometric or uniform.
    - `branch_depth` "auto": "full" waits until branches are K deep.
    - `ngrams` True: let repeated text fill what the drafter has not reached.
    - `trees` False: True verifies several drafts at once, as a tree, where that pays and the target can.
    - `colocate` False: the target drafts in its own process, in turn with verifying.
    - `shards` 1: ranks of the target on this machine, each with a part of each layer.
    - `await_target` False: start none; one that joins (`outrider worker target`) is waited for.
    - `endpoint`: where clients connect, ipc://PATH or tcp://HOST:PORT; None: a fresh socket of its own.
    - `threads` 1: threads of each worker for matrix products. `cpu_kernels` "auto": what computes on a CPU: mlx, or
      ONNX Runtime where it serves the model. `pin_cores` True: where there are two cores, target and drafter keep to
      one each. `max_active`: requests in flight at once; None: from the
      memory that texts may take, at most 16.
    - `kv_memory` None: bytes, or like "2GB", for keys and values in all workers; None: by the machine.
    - `prompt_cache` True: keep what was read of texts that have ended, for those that begin alike.
    - `memory` True: carry over from run to run what `auto` learned of this pair on this machine.
    - `max_waiting` 256: how many may wait. `worker_timeout` 10: seconds of silence until a worker is given up.
    - `workers_endpoint`: where drafters of other machines join, tcp://HOST:PORT. `keys`: the folder of keys; None: that
      of `outrider keys`. `keyed` False: ask for keys also where only this machine reaches an endpoint.
      `advertise` False: announce `workers_endpoint` on the local network.
    - `prefill_workers` 0: processes that read prompts of `prefill_from` tokens and more (None: what tune found, else
      512) in the target's place; `prefill_backend` "mlx" or "coreml".
    - `trace`: a file for a timeline. `simulate`: a latency profile to keep to. `log_level` "warning".
    - `log_format` "text", or "json": an object a line on stderr, from every process.

    Raises:
        OutriderError: of the class that says what is wrong, when the cluster can't start.
    """

    def __init__(self, *, progress: Callable[[str], None] | None = None, **settings: Unpack[Settings]) -> None:
        if not settings.keys() <= Settings.__annotations__.keys():
            raise values.unknown_keyword("LocalCluster", settings, (*Settings.__annotations__, "progress"))
        checked = settings_from(settings)
        self._models = (
            " and ".join(str(one) for one in (checked.model, checked.draft_model) if one) or "the default model"
        )
        self._line, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                python("-m", "outrider", "serve", "--no-http", *flags(checked), "--parent-fd", str(theirs.fileno())),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                env=child_environment(),
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for this process; it ends the server in order
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
        """A client that notices at once when the server has ended.

        `timeout`: for how many seconds the server may keep silent; inf, the default: for as long as its process lives,
        however busy the machine is.
        """
        return Client(self.own_endpoint, timeout, self._check)

    def async_client(self, timeout: float = math.inf) -> AsyncClient:
        """The same for asyncio."""
        return AsyncClient(self.own_endpoint, timeout, self._check)

    def wait(self) -> int:
        """Returns when the server has ended, however it did: its code, negative for the signal that ended it."""
        return self._process.wait()

    def close(self) -> None:
        """Ends the server and its workers, in order where it can. Again does nothing.

        Raises:
            OutriderError: something could not be finished, such as a trace on a full disk; everything is ended.
        """
        left = self._end()
        if left is not None:
            raise as_error(left.kind, left.message)

    def _end(self) -> Unfinished | None:
        """Closes one way of the line, which ends the server, and hears on the other what it has to say at last."""
        if self._line.fileno() < 0:
            return None
        told: list[Announcement] = []
        with self._line, suppress(OSError):
            self._line.settimeout(END_SECONDS)
            self._line.shutdown(socket.SHUT_WR)
            if self._process.poll() is None:
                self._process.send_signal(signal.SIGTERM)  # for a server that has not yet come to look at the line
            told += announcements(self._line)
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        return next((one for one in told if isinstance(one, Unfinished)), None)

    def __enter__(self) -> LocalCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._end()  # the error on its way is the one to be told

    def _wait_until_ready(self, progress: Callable[[str], None] | None) -> ServerReady:
        for told in announcements(self._line):
            match told:
                case ServerReady():
                    return told
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
            raise ServerStopped(f"the server {how} while it was asked; start it again")
