"""`python -m outrider.target_worker`: loads the target, sends HELLO and serves until SHUTDOWN.

With `--shards` it starts further ranks of itself; with `--shard` it is one of several ranks that mlx.launch started.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from outrider.engine.models_only import models_only
from outrider.protocol import worker_link
from outrider.protocol.digest import model_digest
from outrider.protocol.errors import CannotDraft, OutriderError
from outrider.protocol.heads import DRAFT_MODEL, HEAD_KINDS, NGRAM
from outrider.protocol.messages import Hello
from outrider.protocol.process import configure_logging
from outrider.protocol.worker_link import WorkerLink, end_with_parent
from outrider.target_worker.rank_link import RANK_VARIABLE, LocalRanks

if TYPE_CHECKING:
    from outrider.drafters.heads.head import Head
    from outrider.engine.loading import LoadedModel
    from outrider.target_worker.ranks import RankLeader
    from outrider.target_worker.worker import TargetWorker

    Load = Callable[[argparse.Namespace, RankLeader | None, WorkerLink], tuple[Hello, TargetWorker]]

log = logging.getLogger(__name__)


def load_worker(options: argparse.Namespace, leader: RankLeader | None, link: WorkerLink) -> tuple[Hello, TargetWorker]:
    """Returns the worker and its HELLO, once the model is loaded and checked. `leader`: of a sharded model's ranks."""
    link.report("importing MLX")
    models_only()
    from outrider.engine import memory
    from outrider.engine.load_checks import probe_abilities
    from outrider.engine.loading import load
    from outrider.target_worker import in_process_drafters
    from outrider.target_worker.worker import TargetWorker

    model = leader.load(options.model, link.report) if leader is not None else load(options.model, progress=link.report)
    link.report("checking the model")
    found = probe_abilities(model)
    kv_cache = leader.open_shared_kv_cache(model) if leader is not None else None
    own, ngrams = (options.drafter, options.ngrams) if found.chains else ((), None)
    drafters = in_process_drafters.load(own, model, link.report, leader is None, ngrams=ngrams)
    head, features, note = _remote_head(options.publish_features, model, link.report, leader is None)
    left_out = (*drafters.left_out, note) if head is not None and note else drafters.left_out
    found = replace(found, ngrams=NGRAM in drafters.drafters, drafters=drafters.infos, left_out=left_out)
    notes = [f"drafting in this process with {info.model}" for info in drafters.infos]
    notes += [*drafters.left_out, *drafters.notes, note, leader.note if leader is not None else ""]
    memory.set_limits(model.weight_bytes + drafters.weight_bytes)  # each load has set them for one model only
    worker = TargetWorker(link, model, drafters, kv_cache, leader, head)
    if found.chains and not worker.verifies_trees:
        notes.append("drafts are verified as chains, not as trees")
    hello = Hello(
        role="target",
        name=options.name,
        incarnation=link.incarnation,
        pid=os.getpid(),
        backend="mlx",
        model=options.model,
        vocab_size=model.vocab_size,
        context_length=model.context_length,
        parameters=model.parameters,
        weight_bytes=model.weight_bytes * (leader.ranks_here if leader is not None else 1),
        note="; ".join(filter(None, notes)),
        abilities=replace(found, takes_kv=worker.takes_kv, trees=found.chains and worker.verifies_trees),
        kv=worker.kv,
        files=model_digest(model.folder) if model.folder is not None else "",
        number_format=model.number_format,
        features=features,
    )
    return hello, worker


def _remote_head(
    given: tuple[str, str] | None, model: LoadedModel, progress: Callable[[str], None], unsharded: bool
) -> tuple[Head | None, str, str]:
    """Returns the head of a draft worker, given by its kind and folder, whose features the target publishes, their
    source, and a note. There is none if the head can't be used."""
    if given is None:
        return None, "", ""
    from outrider.drafters.heads import load as heads

    kind, folder = given
    try:
        drafter = heads.load(kind, folder, model, progress, unsharded)
    except CannotDraft as error:
        return None, "", str(error)
    features = heads.feature_source(drafter.head, Path(folder), model.folder or Path())
    return drafter.head, features, drafter.note


def main(load: Load = load_worker) -> int:
    """Runs a target that `load` loads. Returns the exit code."""
    options = _parser().parse_args()
    process = f"{options.name} rank {os.environ.get(RANK_VARIABLE, '')}".strip() if options.shard else options.name
    configure_logging(options.log_level, options.log_format, process, options.log_fd)
    if options.shards == 1 and not options.shard:
        return worker_link.run_worker(options, lambda link: load(options, None, link))
    try:
        return _as_rank(options, load)
    except OutriderError as error:
        log.error("%s", error)
        return error.exit_code


def _as_rank(options: argparse.Namespace, load: Load) -> int:
    """Runs one of several ranks: rank 0 serves, the others follow it. Signals end it while it waits for the others."""
    if options.parent_fd is not None:
        end_with_parent(options.parent_fd)
    with ExitStack() as stack:
        local = None
        if not options.shard:
            inherited = [options.log_fd] if options.log_fd is not None else []
            local = LocalRanks(options.shards, [*sys.argv[1:], "--shard"], inherited)
            stack.callback(local.kill)
        models_only()
        from outrider.engine.ranks import join
        from outrider.target_worker.ranks import RankLeader, follow

        ranks = join()
        if ranks.rank > 0:
            return follow(ranks, options.model)
        leader = RankLeader(ranks, local)
        stack.callback(leader.close)
        return worker_link.run_worker(options, lambda link: load(options, leader, link))


def _parser() -> argparse.ArgumentParser:
    parser = worker_link.create_parser("outrider.target_worker")
    drafts = f"draft in this process with a model ({DRAFT_MODEL}) or a head ({', '.join(HEAD_KINDS)}); repeatable"
    parser.add_argument("--drafter", nargs=2, action="append", default=[], metavar=("KIND", "PATH"), help=drafts)
    parser.add_argument("--ngrams", metavar="TABLE", help="draft from n-grams, also of this table (empty: no table)")
    features = "publish the features that this head reads in the draft worker"
    parser.add_argument("--publish-features", nargs=2, metavar=("KIND", "PATH"), help=features)
    parser.add_argument("--shards", type=int, required=True, help="ranks here, each with a part of the model")
    parser.add_argument("--shard", action="store_true", help="run as one of several ranks that mlx.launch started")
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
