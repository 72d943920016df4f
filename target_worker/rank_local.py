"""The further ranks of a target on this machine: processes that rank 0 starts and that end with it.

They form MLX's ring over loopback, and find each other by a file of addresses. Knows processes; nothing of their work.
"""

from __future__ import annotations

import json
import logging
import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path

from outrider.protocol.errors import WorkerError

RANK, HOSTS = "MLX_RANK", "MLX_HOSTFILE"
END_SECONDS = 5.0

log = logging.getLogger(__name__)


class LocalRanks:
    """Ranks 1.. of `size`, each this program with `arguments`; this process becomes rank 0.

    Each ends when rank 0's end of a pipe closes, however rank 0 ends.
    """

    def __init__(self, size: int, arguments: Sequence[str], inherited: Sequence[int]) -> None:
        """`inherited`: further descriptors that they need. Raises WorkerError: a rank can't be started."""
        self._ending = False
        theirs, self._lifeline = os.pipe()
        self._folder = tempfile.TemporaryDirectory(prefix="outrider-ranks-")
        hosts = Path(self._folder.name, "hosts.json")
        hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(size)]), encoding="utf-8")
        os.environ.update({HOSTS: str(hosts), RANK: "0"})
        self._processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(1, size):
                self._processes.append(
                    subprocess.Popen(
                        [sys.executable, "-P", "-m", "outrider.target_worker", *arguments, "--parent-fd", str(theirs)],
                        stdin=subprocess.DEVNULL,
                        env={**os.environ, RANK: str(rank)},
                        pass_fds=[theirs, *inherited],
                    )
                )
        except OSError as error:
            self.kill()
            raise WorkerError(f"a rank can't be started ({error}); expected {sys.executable} to run") from None
        finally:
            os.close(theirs)
        for rank, process in enumerate(self._processes, start=1):
            threading.Thread(target=self._watch, args=(rank, process), daemon=True, name=f"rank {rank}").start()

    def met(self) -> None:
        """All ranks have found each other, so the file of addresses is removed."""
        self._folder.cleanup()

    def kill(self) -> None:
        """Ends them at once, also those that are stopped."""
        for process in self._processes:
            process.kill()
        self._folder.cleanup()

    def expect_end(self) -> None:
        """From now on they may end."""
        self._ending = True

    def close(self) -> None:
        """Waits for the ranks to end, and kills those that don't."""
        for process in self._processes:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                break
        self.kill()

    def _watch(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        """Ends all ranks when one ends early, because others may wait for it in a collective forever."""
        code = process.wait()
        if not self._ending:
            log.error("rank %d ended with code %d; all ranks end", rank, code)
            self.kill()
            os._exit(WorkerError.exit_code)


def free_ports(count: int) -> list[int]:
    """So many free ports."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in held]
    for one in held:
        one.close()
    return ports
