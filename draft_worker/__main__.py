"""`python -m outrider.draft_worker`: loads its drafter, sends HELLO and works ahead until SHUTDOWN."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import mlx.core as mx

from outrider.draft_worker.worker import DraftWorker
from outrider.drafters.drafter import NAMES, make
from outrider.drafters.fan_out import POLICIES
from outrider.drafters.replay import PacedDrafter, ReplayDrafter, SlowLink
from outrider.engine.memory import PeakMemory
from outrider.engine.models_only import models_only
from outrider.engine.pace import Pace
from outrider.grammar.compiler import TOKENIZER, Compiler
from outrider.protocol import process, worker_link
from outrider.protocol.messages import Hello, Loading, WorkerNote
from outrider.protocol.profile import Profile
from outrider.protocol.worker_link import Link, WorkerLink


def main() -> int:
    options = _parser().parse_args()
    process.set_up(options.log_level, options.log_format, options.name, options.log_fd)
    if options.device == "cpu":
        mx.set_default_device(mx.cpu)
    return worker_link.run(options, lambda link: _load(options, link))


def _load(options: argparse.Namespace, link: WorkerLink) -> tuple[Hello, DraftWorker]:
    def report(stage: str) -> None:
        link.send(Loading("draft", stage))

    report(f"starting the {options.backend} drafter")
    models_only()
    drafter = make(options.backend, options.model, report, options.prefill, options.target)
    far: Link = link
    if options.simulate:
        profile = Profile.read(options.simulate)
        far = slow = SlowLink(link, profile.link_ms)
        if isinstance(drafter, ReplayDrafter):
            drafter = drafter.erring_like(profile)
        pace = Pace(profile.draft, slow.nap, complain=lambda why: link.send(WorkerNote(link.name, why)))
        drafter = PacedDrafter(drafter, profile.name, pace, lambda: slow.heard)
    hello = Hello(
        role="draft",
        name=options.name,
        incarnation=link.incarnation,
        pid=os.getpid(),
        backend=drafter.backend,
        model=options.model,
        vocab_size=drafter.vocab_size,
        context_length=drafter.context_length,
        parameters=drafter.parameters,
        weight_bytes=drafter.weight_bytes,
        note=drafter.note,
        kv=drafter.prompt_cache.cost,
        vocabulary=options.vocabulary,
        features=getattr(drafter, "features", ""),
    )
    memory = PeakMemory() if options.backend == "mlx" else None
    folder = Path(options.target or options.model)
    compiler = Compiler(folder) if (folder / TOKENIZER).is_file() else None
    return hello, DraftWorker(far, drafter, POLICIES[options.fan_out], memory, compiler)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="draft_worker", description=__doc__)
    worker_link.add_flags(parser, "draft-0")
    parser.add_argument("--backend", choices=NAMES, default="mlx")
    parser.add_argument("--model", required=True, help="a model directory; for replay, its script")
    parser.add_argument("--target", default="", help="the model whose hidden states a head reads")
    parser.add_argument("--prefill", default="auto", help="what reads prompts for mlx: auto, mlx, coreml or a package")
    parser.add_argument("--device", choices=["auto", "cpu"], default="auto", help="where MLX computes")
    parser.add_argument("--fan-out", choices=sorted(POLICIES), default="best-first")
    parser.add_argument("--simulate", type=Path, help="a latency profile to simulate, see docs/simulation.md")
    parser.add_argument("--vocabulary", default="", help="a digest of the texts of the model's tokens")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
