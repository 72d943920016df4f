"""`python -m outrider.target_worker`: loads the target, says HELLO, serves until told to stop."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from outrider.protocol import logs
from outrider.protocol.abilities import Abilities
from outrider.protocol.errors import CannotDraft, OutriderError
from outrider.protocol.messages import Hello, Loading, Remark
from outrider.protocol.profile import Profile
from outrider.protocol.worker_link import WorkerLink


def main() -> int:
    options = _parser().parse_args()
    logs.set_up(options.log_level, options.log_format, options.name, options.log_fd)
    with WorkerLink(options.endpoint, options.name, options.parent_fd, options.incarnation) as link:
        try:
            link.send(Loading("target", "importing MLX"))
            from outrider.drafting.mlx import MlxDrafter
            from outrider.engine import memory
            from outrider.engine.abilities import abilities
            from outrider.engine.loading import load
            from outrider.engine.pace import Pace
            from outrider.target_worker.colocated import Colocated
            from outrider.target_worker.worker import TargetWorker

            profile = Profile.read(options.simulate) if options.simulate else None

            def tell(stage: str) -> None:
                link.send(Loading("target", stage))

            model = load(options.model, progress=tell)
            tell("trying what the model can do")
            able, colocated = abilities(model), None
            if options.draft_model:
                try:
                    colocated = Colocated(MlxDrafter.load(options.draft_model, tell))
                except CannotDraft as error:
                    able = Abilities(chains=False, why=str(error))
            if colocated is not None:  # each load has set the limits for its own weights alone
                memory.set_limits(model.weight_bytes + colocated.drafter.weight_bytes)
            pace = Pace(profile.target, complain=lambda why: link.send(Remark(link.name, why))) if profile else None
            worker = TargetWorker(link, model, pace, colocated)
        except OutriderError as error:
            return link.failed(error)
        drafts = f"drafting in this process with {options.draft_model}" if colocated else ""
        note = f"simulating {profile.name}" if profile else drafts
        hello = Hello(
            "target",
            options.name,
            link.incarnation,
            os.getpid(),
            "mlx",
            options.model,
            model.vocab_size,
            model.context_length,
            model.parameters,
            model.weight_bytes,
            note,
            able,
            worker.kv,
        )
        try:
            link.enter(hello)
        except OutriderError as error:
            return link.failed(error)
        worker.run()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="target_worker", description=__doc__)
    parser.add_argument("--endpoint", required=True)
    parser.add_argument("--name", default="target-0")
    parser.add_argument("--model", required=True)
    parser.add_argument("--draft-model", help="a model that drafts in this process, in turn with the target")
    parser.add_argument("--simulate", type=Path, help="a latency profile to keep to, docs/simulation.md")
    parser.add_argument("--parent-fd", type=int, default=None)
    parser.add_argument("--incarnation", type=int, default=None, help="drawn when none is given")
    parser.add_argument("--log-level", default="warning")
    parser.add_argument("--log-format", choices=logs.FORMATS, default="text")
    parser.add_argument("--log-fd", type=int, default=None, help="where the server that started it logs")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
