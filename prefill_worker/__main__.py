"""`python -m outrider.prefill_worker`: loads the target's model, says HELLO, reads prompts until told to stop."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Callable
from pathlib import Path

from outrider.prefill_worker.mlx_reader import MlxReader
from outrider.prefill_worker.package_reader import CoreMLReader
from outrider.prefill_worker.reader import Reader, Tell
from outrider.prefill_worker.worker import PrefillWorker
from outrider.protocol import logs
from outrider.protocol.digest import digest
from outrider.protocol.errors import KeyFault, OutriderError
from outrider.protocol.keyring import Keyring
from outrider.protocol.messages import Hello, Loading
from outrider.protocol.worker_link import OrchestratorGone, WorkerLink

READERS: dict[str, Callable[[str, Tell], Reader]] = {"mlx": MlxReader.load, "coreml": CoreMLReader.load}

log = logging.getLogger(__name__)


def main() -> int:
    options = _parser().parse_args()
    logs.set_up(options.log_level, options.log_format, options.name, options.log_fd)
    try:
        keys = Keyring(options.keys).to_reach(options.endpoint, options.server_key)
    except KeyFault as fault:
        log.error("%s", fault)
        return fault.exit_code
    with WorkerLink(options.endpoint, options.name, options.parent_fd, options.incarnation, keys) as link:
        try:
            reader = READERS[options.backend](options.model, lambda stage: link.send(Loading("prefill", stage)))
        except OutriderError as error:
            return link.failed(error)
        hello = Hello(
            role="prefill",
            name=options.name,
            incarnation=link.incarnation,
            pid=os.getpid(),
            backend=options.backend,
            model=options.model,
            vocab_size=reader.size.vocab_size,
            context_length=reader.size.context_length,
            parameters=reader.size.parameters,
            weight_bytes=reader.size.weight_bytes,
            note=reader.note,
            kv=reader.prompt_cache.cost,
            files=digest(Path(options.model)),
        )
        worker = PrefillWorker(link, reader)
        while True:
            try:
                link.enter(hello)
                worker.run()
                return 0
            except OrchestratorGone as gone:
                log.warning("%s; this prefill worker waits for it, or for the next one", gone)
                worker.forget()
            except OutriderError as error:
                return link.failed(error)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="prefill_worker", description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--name", default="prefill-0")
    parser.add_argument("--backend", choices=sorted(READERS), default="mlx")
    parser.add_argument("--model", required=True, help="the target's model directory")
    parser.add_argument("--parent-fd", type=int, default=None)
    parser.add_argument("--incarnation", type=int, default=None, help="drawn when none is given")
    parser.add_argument("--keys", type=Path, default=None, help="the folder of keys")
    parser.add_argument("--server-key", default=None, help="the server's public key; else as the folder knows it")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text")
    parser.add_argument("--log-fd", type=int, default=None, help="where the server that started it logs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
