"""Flags that several commands share, and the records they become. Names are mlx-lm's where mlx-lm has the flag."""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from outrider.orchestrator.cli import text_file
from outrider.orchestrator.pair.pulled import OFFLINE
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
from outrider.protocol.worker_process import KERNELS

_DEFAULTS = ServeSettings()
_SAMPLING = SamplingParams()
OF_MANY_REQUESTS = ("max_active", "max_waiting", "await_target")
"""What makes no difference to a cluster that one person asks, or one that nobody else can join."""


def add_request_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """How one request is run; they hold for a server that is running already, too. `without`: see `_adder`."""
    add = _adder(parser, "speculation", without)
    add("--mode", metavar="|".join(MODES), help=f"how tokens are generated (default: {_DEFAULTS.mode})")
    copied = "what is copied from the text may be longer"
    add("--num-draft-tokens", type=int, metavar="K", help=f"draft tokens a round (default: {DRAFT_TOKENS}); {copied}")
    one = "use this drafter only: draft, ngram, or a head such as eagle3 or mtp (default: all)"
    add("--drafter", metavar="NAME", help=one)
    add("--branches", type=int, metavar="B", help=f"outcomes to prepare for in a round (default: {BRANCHES})")


def add_cluster_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """What a cluster is started with. `without`: see `_adder`."""
    add = _adder(parser, "models", without)
    target = "target: a name of `outrider pairs`, a Hugging Face id, a folder or a GGUF file (default: smollm2)"
    add("--model", metavar="ID|PATH", help=target)
    small = "a small model of the same family (default: the one that comes with --model, if any)"
    add("--draft-model", metavar="ID|PATH", help=small)
    local = "download nothing: use what is on this machine (as HF_HUB_OFFLINE=1 does)"
    add("--offline", action=_Offline, nargs=0, help=local)
    keep = "keep in half precision what MLX can't hold as a GGUF file has it, instead of quantizing it anew"
    add("--gguf-keep-precision", action="store_true", default=None, help=keep)
    drafts = f"what drafts: {', '.join(DRAFT_BACKENDS)} (default: {_DEFAULTS.draft_backend})"
    add("--draft-backend", metavar="NAME", help=drafts)
    head = "a head that also drafts, in the target's process; mtp or early-exit: the model's own; repeatable"
    add("--head", action="append", metavar="ID|PATH", help=f"{head} (default: none)")
    where = f"the process that a head drafts in (default: {_DEFAULTS.head_in})"
    add("--head-in", metavar="|".join(HEAD_PLACES), help=where)
    add = _adder(parser, "drafting", without)
    add("--drafters", type=int, metavar="N", help="draft processes, which share the outcomes (default: 1)")
    reader = "what reads an mlx drafter's prompts (default: auto)"
    add("--draft-prefill", metavar="auto|mlx|coreml|PACKAGE", help=reader)
    device = "where draft workers on MLX compute (default: auto, where the target does)"
    add("--draft-device", metavar="|".join(DRAFT_DEVICES), help=device)
    add("--colocate", action="store_true", default=None, help="draft in the target's process")
    add("--fan-out", metavar="|".join(FAN_OUTS), help=f"how outcomes are chosen (default: {_DEFAULTS.fan_out})")
    full = f"full: wait until branches are K tokens deep (default: {_DEFAULTS.branch_depth})"
    add("--branch-depth", metavar="|".join(BRANCH_DEPTHS), help=full)
    add("--no-ngrams", dest="ngrams", action="store_false", default=None, help="copy no drafts from the text")
    trees = "verify drafts of several drafters at once, where that pays and the target can"
    add("--trees", action="store_true", default=None, help=trees)
    add("--replay", type=Path, metavar="FILE", help="the script of the replay drafter (default: none)")
    add = _adder(parser, "workers", without)
    add("--threads", type=int, metavar="N", help="threads of each worker for matrix products (default: 1)")
    kernels = "what computes on a CPU; auto: ONNX Runtime, or MLX for models that it does not serve (default: auto)"
    add("--cpu-kernels", metavar="|".join(KERNELS), help=kernels)
    free = "let target and drafter run on any core, on a machine that has two"
    add("--no-pin-cores", dest="pin_cores", action="store_false", default=None, help=free)
    add("--shards", type=int, metavar="N", help="ranks of the target on this machine (default: 1)")
    add("--prefill-workers", type=int, metavar="N", help="processes that read long prompts (default: 0)")
    least = "the shortest prompt that they read (default: what tune found, else 512)"
    add("--prefill-from", type=int, metavar="TOKENS", help=least)
    by = f"backend of prefill workers (default: {_DEFAULTS.prefill_backend})"
    add("--prefill-backend", metavar="|".join(PREFILL_BACKENDS), help=by)
    wait = "start no target; one joins by `outrider worker target`"
    add("--await-target", action="store_true", default=None, help=wait)
    timeout = f"seconds of silence before a worker is considered dead (default: {_DEFAULTS.worker_timeout})"
    add("--worker-timeout", type=int, metavar="SECONDS", help=timeout)
    profile = "a machine's latency profile to keep to (default: none)"
    add("--simulate", type=Path, metavar="FILE", help=profile)
    add = _adder(parser, "requests and memory", without)
    most = "requests in flight at once (default: as many as fit in memory, at most 16)"
    add("--max-active", type=int, metavar="N", help=most)
    waiting = f"requests that may wait; more are refused (default: {_DEFAULTS.max_waiting})"
    add("--max-waiting", type=int, metavar="N", help=waiting)
    memory = "for keys and values in all workers, like 2GB (default: half of what the weights leave)"
    add("--kv-memory", metavar="SIZE", help=memory)
    forget = "read every prompt in full"
    add("--no-prompt-cache", dest="prompt_cache", action="store_false", default=None, help=forget)
    forget = "mode auto starts without what it learned before, and saves nothing"
    add("--no-memory", dest="memory", action="store_false", default=None, help=forget)
    add = _adder(parser, "keys, logs and traces", without)
    folder = "the folder of your keys (default: ~/.config/outrider/keys)"
    add("--keys", type=Path, metavar="FOLDER", help=folder)
    trace = "write a timeline for chrome://tracing or Perfetto (default: none)"
    add("--trace", type=Path, metavar="FILE", help=trace)
    add_log_flag(add)
    form = f"json: an object a line on stderr, from every process (default: {_DEFAULTS.log_format})"
    add("--log-format", metavar="|".join(logs.FORMATS), help=form)


def add_log_flag(add: Callable[..., object]) -> None:
    """By a parser's or a group's `add_argument`."""
    add("--log-level", metavar="|".join(LOG_LEVELS), help=f"the least that is logged (default: {_DEFAULTS.log_level})")


def add_sampling_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """How tokens are chosen and where the text ends. `without`: see `_adder`."""
    add = _adder(parser, "sampling", without)
    most = f"tokens to generate at most (default: {_SAMPLING.max_tokens})"
    add("--max-tokens", "-m", "-n", type=int, metavar="N", help=most)
    fewest = f"tokens before the model may end the text (default: {_SAMPLING.min_tokens})"
    add("--min-tokens", type=int, metavar="N", help=fewest)
    presets = "; ".join(map(_preset, PRESETS))
    add("--preset", choices=PRESETS, help=f"settings by name: {presets} (default: none)")
    add("--temp", "--temperature", type=float, metavar="T", help="temperature (default: 0, the likeliest token)")
    top = "sample from the likeliest tokens that make up this probability (default: 1, all)"
    add("--top-p", type=float, metavar="P", help=top)
    least = "leave out tokens below this share of the likeliest one's probability (default: 0)"
    add("--min-p", type=float, metavar="P", help=least)
    add("--top-k", type=int, metavar="N", help="sample from the N likeliest tokens (default: 0, all)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text (default: drawn)")
    for name, neutral in (("repetition", "1"), ("presence", "0"), ("frequency", "0")):
        penalty = f"penalty of tokens that the text has already, {NATURES[name]} (default: {neutral}, none)"
        add(f"--{name}-penalty", type=float, metavar="X", help=penalty)
        size = getattr(_SAMPLING, f"{name}_context_size")
        add(f"--{name}-context-size", type=int, metavar="N", help=f"its latest N tokens count (default: {size})")
    add("--logit-bias", metavar="JSON", help='token ids and what is added, like {"11": -5.0} (default: none)')
    add("--stop", action="append", metavar="TEXT", help="end the text before this; repeatable (default: none)")
    add("--ignore-eos", action="store_true", default=None, help="go on when the model would end the text")
    only = parser.add_argument_group("format of the text").add_mutually_exclusive_group()
    schema = "the text must be JSON that this JSON Schema allows (default: any text)"
    only.add_argument("--json-schema", metavar="FILE|JSON", help=schema)
    lark = "the text must match this grammar, Lark or GBNF (default: any text)"
    only.add_argument("--grammar", dest="lark", type=Path, metavar="FILE", help=lark)
    expression = "the text must match this regular expression (default: any text)"
    only.add_argument("--regex", metavar="PATTERN", help=expression)
    add = _adder(parser, "details of sampling", without)
    each = "with --json: each token's log-probability and the N likeliest alternatives (default: none)"
    add("--logprobs", type=int, metavar="N", help=each)
    rule = f"how drafts are accepted (default: {_SAMPLING.rule})"
    add("--sampling", dest="rule", metavar="|".join(RULES), help=rule)
    add("--saguaro", type=float, metavar="C", help="residual: weight of prepared tokens (default: 1)")
    width = f"residual: tokens of the draft's distribution (default: {_SAMPLING.q_width})"
    add("--q-width", type=int, metavar="M", help=width)


NATURES = {"repetition": "by division", "presence": "once", "frequency": "for each time"}
"""How each penalty is taken off a token's score."""


class _Offline(argparse.Action):
    """Sets the variable that all that downloads looks at, here and in the processes that are started from here."""

    def __call__(self, *_: object) -> None:
        os.environ[OFFLINE] = "1"


def _adder(parser: argparse.ArgumentParser, title: str, without: Collection[str]) -> Callable[..., None]:
    """Adds flags to a group of this title, except the settings named in `without`: the command can't use them."""
    group = parser.add_argument_group(title)

    def add(*names: str, **options: Any) -> None:
        if options.get("dest", names[0].lstrip("-").replace("-", "_")) not in without:
            group.add_argument(*names, **options)

    return add


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
    if options.regex is not None:
        return Grammar("regex", options.regex)
    if options.lark is not None:
        return Grammar("grammar", text_file.read(options.lark, "a text file"))
    if options.json_schema is None:
        return None
    if options.json_schema.lstrip().startswith("{"):
        return Grammar.json_schema(options.json_schema.strip())
    return Grammar.json_schema(text_file.read(Path(options.json_schema), "a file with a JSON Schema, or the schema"))


def _preset(name: str) -> str:
    return f"{name}: " + " ".join(f"{field.replace('_', '-')} {value:g}" for field, value in PRESETS[name].items())


def _bias(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = json.loads(text)
        return tuple((int(token), float(bias)) for token, bias in pairs.items())
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f'logit_bias is {text!r}; expected a JSON object like {{"11": -5.0}}') from None
