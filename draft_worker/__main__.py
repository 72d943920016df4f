"""`python -m outrider.draft_worker`: loads its drafter, sends HELLO and works ahead until SHUTDOWN."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import mlx.core as mx

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.drafter import BACKENDS, Drafter, make_drafter
from outrider.drafters.fan_out import FAN_OUT_POLICIES
from outrider.engine.models_only import models_only
from outrider.grammar.compiler import TOKENIZER_FILE, GrammarCompiler
from outrider.protocol import process, worker_link
from outrider.protocol.messages import Abilities, Hello
from outrider.protocol.worker_link import Link, WorkerLink

Load = Callable[[argparse.Namespace, WorkerLink], tuple[Hello, DraftWorker]]


def load_worker(options: argparse.Namespace, link: WorkerLink) -> tuple[Hello, DraftWorker]:
    """Returns the worker and its HELLO, once the drafter is loaded."""
    return worker_of(options, link.incarnation, load_drafter(options, link), link)


def load_drafter(options: argparse.Namespace, link: WorkerLink) -> Drafter:
    link.report(f"starting the {options.backend} drafter")
    models_only()
    return make_drafter(options.backend, options.model, link.report, options.prefill, options.target)


def worker_of(options: argparse.Namespace, incarnation: int, drafter: Drafter, link: Link) -> tuple[Hello, DraftWorker]:
    """Returns a worker that serves requests from `link` with `drafter`, and its HELLO."""
    hello = Hello(
        role="draft",
        name=options.name,
        incarnation=incarnation,
        pid=os.getpid(),
        backend=drafter.backend,
        model=options.model,
        vocab_size=drafter.vocab_size,
        context_length=drafter.context_length,
        parameters=drafter.parameters,
        weight_bytes=drafter.weight_bytes,
        note=drafter.note,
        abilities=Abilities(left_out=drafter.left_out),
        kv=drafter.prompt_cache.cost,
        vocabulary=options.vocabulary,
        features=drafter.features,
    )
    folder = Path(options.target or options.model)
    compiler = GrammarCompiler(folder) if (folder / TOKENIZER_FILE).is_file() else None
    return hello, DraftWorker(link, drafter, FAN_OUT_POLICIES[options.fan_out], compiler)


def main(load: Load = load_worker) -> int:
    """Runs a drafter that `load` loads. Returns the exit code."""
    options = _parser().parse_args()
    process.configure_logging(options.log_level, options.log_format, options.name, options.log_fd)
    if options.device == "cpu":
        mx.set_default_device(mx.cpu)
    return worker_link.run_worker(options, lambda link: load(options, link))


def _parser() -> argparse.ArgumentParser:
    parser = worker_link.create_parser("outrider.draft_worker")
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--target", default="", help="the model whose hidden states a head reads")
    parser.add_argument("--prefill", required=True, help="what reads prompts for mlx: mlx, coreml or a package")
    parser.add_argument("--device", choices=["auto", "cpu"], required=True, help="where MLX computes")
    parser.add_argument("--fan-out", choices=sorted(FAN_OUT_POLICIES), required=True)
    parser.add_argument("--vocabulary", default="", help="a digest of the texts of the model's tokens")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
