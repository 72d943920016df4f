"""Flags that several commands share, and the records they become. Names are mlx-lm's where mlx-lm has the flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from outrider.orchestrator.cli import text_file
from outrider.orchestrator.settings import (
    BRANCH_DEPTHS,
    BRANCHES,
    DRAFT_BACKENDS,
    DRAFT_DEVICES,
    DRAFT_TOKENS,
    FAN_OUTS,
    HEAD_PLACES,
    LOG_LEVELS,
    MODES,
    PREFILL_BACKENDS,
    ServeSettings,
)
from outrider.protocol import logs
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.grammar import Grammar
from outrider.protocol.sampling import PRESETS, RULES, SamplingParams

_DEFAULTS = ServeSettings()
_SAMPLING = SamplingParams()


def add_request_flags(parser: argparse.ArgumentParser, mode: bool = True, depth: bool = True) -> None:
    """How one request is run; they hold for a server that is running already, too. False: the command decides that."""
    group = parser.add_argument_group("speculation")
    if mode:
        group.add_argument("--mode", metavar="|".join(MODES), help=f"default {_DEFAULTS.mode}")
    if depth:
        note = f"default {DRAFT_TOKENS}; what is copied from the text may be longer"
        group.add_argument("--num-draft-tokens", type=int, metavar="K", help=note)
    group.add_argument("--drafter", metavar="NAME", help="only this one drafts: draft, ngram, or a head: eagle3, mtp")
    group.add_argument("--branches", type=int, metavar="B", help=f"outcomes a round, default {BRANCHES}")


def add_cluster_flags(parser: argparse.ArgumentParser) -> None:
    """What a cluster is started with."""
    group = parser.add_argument_group("cluster")
    group.add_argument("--model", metavar="ID|PATH", help="target: a Hugging Face id or folder; default: embedded pair")
    group.add_argument("--draft-model", metavar="ID|PATH", help="a small model of the same family")
    drafts = f"who drafts: {', '.join(DRAFT_BACKENDS)}; default {_DEFAULTS.draft_backend}"
    group.add_argument("--draft-backend", metavar="NAME", help=drafts)
    head = "a head that drafts beside them in the target's process; mtp, early-exit: the model's own; again for more"
    group.add_argument("--head", action="append", metavar="ID|PATH", help=head)
    group.add_argument("--drafters", type=int, metavar="N", help="processes that draft, default 1; they share outcomes")
    group.add_argument("--draft-prefill", metavar="auto|mlx|coreml|PACKAGE", help="who reads an mlx drafter's prompts")
    device = "where draft workers on MLX compute, default auto: where the target does"
    group.add_argument("--draft-device", metavar="|".join(DRAFT_DEVICES), help=device)
    group.add_argument("--colocate", action="store_true", default=None, help="draft in the target's process")
    group.add_argument("--shards", type=int, metavar="N", help="ranks of the target on this machine, default 1")
    reads = "processes that read long prompts in the target's place, default 0"
    group.add_argument("--prefill-workers", type=int, metavar="N", help=reads)
    least = "prompts of so many tokens and more; default: what tune found, else 512"
    group.add_argument("--prefill-from", type=int, metavar="TOKENS", help=least)
    by = f"by what they do; default {_DEFAULTS.prefill_backend}"
    group.add_argument("--prefill-backend", metavar="|".join(PREFILL_BACKENDS), help=by)
    wait = "start no target; one joins by `outrider worker target`"
    group.add_argument("--await-target", action="store_true", default=None, help=wait)
    where = f"which process a head drafts in, default {_DEFAULTS.head_in}"
    group.add_argument("--head-in", metavar="|".join(HEAD_PLACES), help=where)
    group.add_argument("--fan-out", metavar="|".join(FAN_OUTS), help=f"default {_DEFAULTS.fan_out}")
    group.add_argument("--branch-depth", metavar="|".join(BRANCH_DEPTHS), help=f"default {_DEFAULTS.branch_depth}")
    group.add_argument("--no-ngrams", dest="ngrams", action="store_false", default=None, help="no drafts from the text")
    trees = "verify drafts of several origins at once, where that pays and the target can"
    group.add_argument("--trees", action="store_true", default=None, help=trees)
    group.add_argument("--threads", type=int, metavar="N", help="BLAS threads of each worker, default 1")
    free = "let target and drafter run on any core, where there are just two"
    group.add_argument("--no-pin-cores", dest="pin_cores", action="store_false", default=None, help=free)
    group.add_argument("--max-active", type=int, metavar="N", help="requests in flight at once; default: from memory")
    waiting = f"requests that may wait, default {_DEFAULTS.max_waiting}; more are refused"
    group.add_argument("--max-waiting", type=int, metavar="N", help=waiting)
    memory = "for keys and values in all workers, like 2GB; default: half of what the weights leave"
    group.add_argument("--kv-memory", metavar="SIZE", help=memory)
    forget = "read every prompt in full"
    group.add_argument("--no-prompt-cache", dest="prompt_cache", action="store_false", default=None, help=forget)
    timeout = f"how long a worker may be silent until it is given up, default {_DEFAULTS.worker_timeout}"
    group.add_argument("--worker-timeout", type=int, metavar="SECONDS", help=timeout)
    forget = "start auto afresh, and keep nothing of what it learns"
    group.add_argument("--no-memory", dest="memory", action="store_false", default=None, help=forget)
    folder = "the folder of keys for endpoints of other machines; default: that of `outrider keys`"
    group.add_argument("--keys", type=Path, metavar="FOLDER", help=folder)
    group.add_argument("--trace", type=Path, metavar="FILE", help="write a timeline for chrome://tracing or Perfetto")
    group.add_argument("--replay", type=Path, metavar="FILE", help="script of the replay drafter")
    group.add_argument("--simulate", type=Path, metavar="FILE", help="a machine's latency profile to keep to")
    add_log_flag(parser)
    form = f"default {_DEFAULTS.log_format}; json: an object a line on stderr, from every process"
    parser.add_argument("--log-format", metavar="|".join(logs.FORMATS), help=form)


def add_log_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--log-level", metavar="|".join(LOG_LEVELS), help=f"default {_DEFAULTS.log_level}")


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen and where the text ends."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", "-m", "-n", type=int, metavar="N", help=f"default {_SAMPLING.max_tokens}")
    group.add_argument("--preset", choices=PRESETS, help="; ".join(map(_preset, PRESETS)))
    group.add_argument("--temp", "--temperature", type=float, metavar="T", help="default 0: greedy")
    group.add_argument("--top-p", type=float, metavar="P")
    group.add_argument("--min-p", type=float, metavar="P")
    group.add_argument("--top-k", type=int, metavar="N")
    group.add_argument("--seed", type=int, metavar="N", help="drawn and reported when not given")
    for name in ("repetition", "presence", "frequency"):
        group.add_argument(f"--{name}-penalty", type=float, metavar="X")
        group.add_argument(f"--{name}-context-size", type=int, metavar="N")
    group.add_argument("--logit-bias", metavar="JSON", help='token ids and what is added, like {"11": -5.0}')
    group.add_argument("--stop", action="append", metavar="TEXT", help="ends the text; may be given several times")
    group.add_argument("--ignore-eos", action="store_true", default=None)
    only = group.add_mutually_exclusive_group()
    only.add_argument("--json-schema", type=Path, metavar="FILE", help="the text is JSON by this JSON Schema")
    only.add_argument("--grammar", dest="lark", type=Path, metavar="FILE", help="the text is by this: Lark's or GBNF")
    only.add_argument("--regex", metavar="PATTERN", help="the text is matched by this regular expression")
    group.add_argument("--logprobs", type=int, metavar="N", help="with --json: each token's, and its N likeliest")
    group.add_argument("--sampling", dest="rule", metavar="|".join(RULES), help=f"default {_SAMPLING.rule}")
    group.add_argument("--saguaro", type=float, metavar="C", help="residual: weight of what is prepared for, default 1")
    group.add_argument("--q-width", type=int, metavar="M", help=f"residual: tokens of q, default {_SAMPLING.q_width}")


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """The cluster settings that were given, as keywords of ServeSettings and LocalCluster. Checks them."""
    given = _given(options, ServeSettings)
    ServeSettings(**given)
    return given


def sampling_of(options: argparse.Namespace) -> SamplingParams:
    """
    Raises:
        InvalidRequest: a value is out of range.
    """
    return SamplingParams(**given_sampling(options))


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """The sampling settings that were given, as keywords of SamplingParams; a flag goes before the preset."""
    given = {**PRESETS.get(options.preset, {}), **_given(options, SamplingParams)}
    if "logit_bias" in given:
        given["logit_bias"] = _bias(given["logit_bias"])
    grammar = _grammar(options)
    return given if grammar is None else {**given, "grammar": grammar}


def set_up_logging(options: argparse.Namespace, process: str = "outrider") -> None:
    """What is said wrongly is told when the settings are checked."""
    level = options.log_level if options.log_level in LOG_LEVELS else _DEFAULTS.log_level
    logs.set_up(level, getattr(options, "log_format", None) or _DEFAULTS.log_format, process)


def _given(options: argparse.Namespace, record: type[Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(record)]
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _grammar(options: argparse.Namespace) -> Grammar | None:
    if getattr(options, "regex", None) is not None:
        return Grammar("regex", options.regex)
    for kind, path in (("json_schema", options.json_schema), ("grammar", options.lark)):
        if path is not None:
            return Grammar(kind, text_file.read(path, "a text file"))
    return None


def _preset(name: str) -> str:
    return f"{name}: " + " ".join(f"{field.replace('_', '-')} {value:g}" for field, value in PRESETS[name].items())


def _bias(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = json.loads(text)
        return tuple((int(token), float(bias)) for token, bias in pairs.items())
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f'logit_bias is {text!r}; expected a JSON object like {{"11": -5.0}}') from None
