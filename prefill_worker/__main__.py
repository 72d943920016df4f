"""`python -m outrider.prefill_worker`: loads the target's model, sends HELLO and reads prompts until SHUTDOWN."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.engine.models_only import models_only
from outrider.protocol import process, worker_link
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import CannotDraft
from outrider.protocol.messages import Hello
from outrider.protocol.worker_link import WorkerLink

if TYPE_CHECKING:
    from outrider.prefill_worker.worker import PrefillWorker


def main() -> int:
    options = _parser().parse_args()
    process.configure_logging(options.log_level, options.log_format, options.name, options.log_fd)
    return worker_link.run_worker(options, lambda link: _load(options, link))


def _load(options: argparse.Namespace, link: WorkerLink) -> tuple[Hello, PrefillWorker]:
    models_only()
    from outrider.drafters.coreml.selection import load_prompt_reader
    from outrider.engine.kv_cache import KVLayout
    from outrider.engine.loading import load, load_lazily
    from outrider.prefill_worker.worker import MlxReader, PrefillWorker

    package = load_prompt_reader(options.model, options.backend, link.report)
    if package and isinstance(package, str):
        raise CannotDraft(f"{package}; use --prefill-backend mlx")
    model = load_lazily(options.model) if package else load(options.model, progress=link.report)
    reader = package or MlxReader(model)
    hello = Hello(
        role="prefill",
        name=options.name,
        incarnation=link.incarnation,
        pid=os.getpid(),
        backend=options.backend,
        model=options.model,
        vocab_size=reader.vocab_size,
        context_length=reader.context_length,
        parameters=reader.parameters,
        weight_bytes=reader.weight_bytes,
        note=reader.note,
        kv=reader.prompt_cache.cost,
        files=model_digest(Path(options.model)),
        number_format=reader.number_format,
    )
    return hello, PrefillWorker(link, reader, KVLayout.of(model.model, model.cpu))


def _parser() -> argparse.ArgumentParser:
    parser = worker_link.create_parser("outrider.prefill_worker")
    parser.add_argument("--backend", choices=["coreml", "mlx"], required=True)
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
