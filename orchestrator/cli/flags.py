"""Flags that several commands share, and the records made from them. A flag that mlx-lm also has keeps its name.

The flags of a cluster are generated from the fields of `ServeSettings`.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import msgspec

from outrider.orchestrator import settings
from outrider.orchestrator.http_settings import HTTP, HttpSettings
from outrider.orchestrator.pairing.pulled import OFFLINE_VARIABLE
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import version
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.process import configure_logging
from outrider.protocol.sampling import SAMPLING_RULES, Grammar, SamplingParams

_SETTINGS = {field.name: field for record in (ServeSettings, HttpSettings) for field in dataclasses.fields(record)}
_SAMPLING_DEFAULTS = dataclasses.asdict(SamplingParams())
MULTI_REQUEST_SETTINGS = ("max_active", "max_waiting", "await_target")
"""Settings that have no effect on a cluster with a single client that no other process can join."""

API_KEY_VARIABLE = "OUTRIDER_API_KEY"


def read_text_file(path: Path, expected: str) -> str:
    """Returns the file's text. Raises InvalidRequest if it can't be read; the message says "expected `expected`"."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InvalidRequest(f"{path} can't be read ({why}); expected {expected}") from None


def add_request_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds the settings of one request, which a running server also takes. `without`: see `_make_adder`."""
    drafter = "use this drafter only: draft, ngram, or a head such as eagle3 or mtp (default: all)"
    add_settings(parser, settings.SPECULATION, without)("--drafter", metavar="NAME", help=drafter)


def add_cluster_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """Adds the settings of a cluster. `without`: see `_make_adder`."""
    local = "download nothing, use local files only; the same as HF_HUB_OFFLINE=1"
    add_settings(parser, settings.MODELS, without)("--offline", action=_OfflineAction, nargs=0, help=local)
    for group in (settings.DRAFTING, settings.WORKERS, settings.MEMORY, settings.LOGS):
        add_settings(parser, group, without)


def add_settings(parser: argparse.ArgumentParser, group: str, without: Collection[str] = ()) -> Callable[..., None]:
    """Adds the flags of a group of settings; returns a function that adds more flags to this group.

    `without`: see `_make_adder`.
    """
    add = _make_adder(parser, group, without)
    for name, field in _SETTINGS.items():
        if field.metadata["group"] == group:
            add_setting(add, name)
    return add


def add_setting(add: Callable[..., object], name: str) -> None:
    """Adds the flag of one setting; `add` is a parser's or a group's `add_argument`."""
    field = _SETTINGS[name]
    flag, kind = settings.flag_of(field), field.metadata.get("type")
    options: dict[str, Any] = {"dest": name, "help": field.metadata["help"]}
    if kind is bool:
        add(flag, action="store_false" if field.default else "store_true", default=None, **options)
    else:
        options |= {"metavar": field.metadata["metavar"]} | ({"type": kind} if kind is not None else {})
        add(flag, **options | ({"action": "append"} if isinstance(field.default, tuple) else {}))


def add_sampling_flags(
    parser: argparse.ArgumentParser, without: Collection[str] = (), recommended: bool = False
) -> None:
    """Adds the flags that say how tokens are chosen and where the text ends. `without`: see `_make_adder`.

    `recommended`: temperature, filters and repetition penalty default to what the model's files recommend.
    """
    add, own = _make_adder(parser, "sampling", without), "the model's, or " if recommended else ""
    add("--max-tokens", "-m", "-n", type=int, metavar="N", help="generate at most N tokens")
    add("--min-tokens", type=int, metavar="N", help="generate at least N tokens before the model may end the text")
    add("--temp", "--temperature", type=float, metavar="T", help=f"temperature (default: {own}0, the likeliest token)")
    top = f"sample from the likeliest tokens whose probabilities add up to P (default: {own}1, all)"
    add("--top-p", type=float, metavar="P", help=top)
    least = f"leave out tokens less likely than P times the likeliest token (default: {own}0, none)"
    add("--min-p", type=float, metavar="P", help=least)
    add("--top-k", type=int, metavar="N", help=f"sample from the N likeliest tokens (default: {own}0, all)")
    add("--seed", type=int, metavar="N", help="the same seed gives the same text (default: random)")
    penalties = {
        "repetition": f"divide the logits of tokens in the text by X; multiply negative ones (default: {own}1, none)",
        "presence": "subtract X from the logits of tokens in the text (default: 0, none)",
        "frequency": "subtract X from a token's logit for each time it is in the text (default: 0, none)",
    }
    for name, effect in penalties.items():
        add(f"--{name}-penalty", type=float, metavar="X", help=effect)
        add(f"--{name}-context-size", type=int, metavar="N", help=f"how many recent tokens the {name} penalty covers")
    add("--logit-bias", metavar="JSON", help='biases added to logits, by token id, like {"11": -5.0}')
    add("--stop", action="append", metavar="TEXT", help="end the text before TEXT; repeatable")
    add("--ignore-eos", action="store_true", default=None, help="continue past the model's end-of-text token")
    only = parser.add_argument_group("format of the text").add_mutually_exclusive_group()
    schema = "generate JSON that matches this JSON Schema (default: any text)"
    only.add_argument("--json-schema", metavar="FILE|JSON", help=schema)
    lark = "generate text that matches this Lark or GBNF grammar (default: any text)"
    only.add_argument("--grammar", dest="lark", type=Path, metavar="FILE", help=lark)
    expression = "generate text that matches this regular expression (default: any text)"
    only.add_argument("--regex", metavar="PATTERN", help=expression)
    add = _make_adder(parser, "details of sampling", without)
    each = "with --json: log-probabilities of each token and of the N likeliest tokens there"
    add("--logprobs", type=int, metavar="N", help=each)
    add("--sampling", dest="rule", metavar="|".join(SAMPLING_RULES), help="how drafts are accepted")
    add("--saguaro", type=float, metavar="C", help="residual: weight of tokens with a prepared branch (default: 1)")
    add("--q-width", type=int, metavar="M", help="residual: keep the M likeliest tokens of the draft's distribution")


class _OfflineAction(argparse.Action):
    """Sets the variable that every download checks, for this process and the processes that it starts."""

    def __call__(self, *_: object) -> None:
        os.environ[OFFLINE_VARIABLE] = "1"


def _make_adder(parser: argparse.ArgumentParser, title: str, without: Collection[str]) -> Callable[..., None]:
    """Returns a function that adds flags to a group of this title, except for the settings named in `without`."""
    group = parser.add_argument_group(title)

    def add(*names: str, **options: Any) -> None:
        name = options.get("dest", names[0].lstrip("-").replace("-", "_"))
        if name in _SAMPLING_DEFAULTS:
            options["help"] = settings.help_with_default(options["help"], _SAMPLING_DEFAULTS[name])
        if name not in without:
            group.add_argument(*names, **options)

    return add


def settings_of(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given cluster settings, checked, as keywords of ServeSettings and LocalCluster."""
    given = _given_fields(options, ServeSettings)
    ServeSettings(**given)
    return given


def given_sampling(options: argparse.Namespace) -> dict[str, Any]:
    """Returns the given sampling settings as keywords of SamplingParams."""
    given = _given_fields(options, SamplingParams)
    if "logit_bias" in given:
        given["logit_bias"] = _parse_logit_bias(given["logit_bias"])
    grammar = _parse_grammar(options)
    return given if grammar is None else {**given, "grammar": grammar}


def set_up_logging(options: argparse.Namespace, process: str = "outrider") -> None:
    """Sets up logging. Raises InvalidRequest if the level or the format is unknown."""
    given = _given_fields(options, ServeSettings)
    log = ServeSettings(**{name: given[name] for name in ("log_level", "log_format") if name in given})
    configure_logging(log.log_level, log.log_format, process)


def _given_fields(options: argparse.Namespace, record: type[Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(record)]
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _parse_grammar(options: argparse.Namespace) -> Grammar | None:
    if options.regex is not None:
        return Grammar("regex", options.regex)
    if options.lark is not None:
        return Grammar("grammar", read_text_file(options.lark, "a text file"))
    if options.json_schema is None:
        return None
    if options.json_schema.lstrip().startswith("{"):
        return Grammar.json_schema(options.json_schema.strip())
    return Grammar.json_schema(read_text_file(Path(options.json_schema), "a file with a JSON Schema, or the schema"))


def _parse_logit_bias(text: str) -> tuple[tuple[int, float], ...]:
    try:
        return tuple(msgspec.json.decode(text, type=dict[int, float], strict=False).items())
    except ValueError:
        raise InvalidRequest(f'logit_bias is {text!r}; expected a JSON object like {{"11": -5.0}}') from None


def ensure_writable(path: Path, instead: str) -> Path:
    """Creates `path` if it is missing, and returns it. Raises InvalidRequest with the advice `instead` on failure."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InvalidRequest(f"nothing can be written to {path}: {error.strerror}; {instead}") from None


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    add = add_settings(parser, HTTP)
    add("--api-key-file", type=Path, metavar="FILE", help="API keys, one per line (default: none)")
    add("--no-http", dest="http", action="store_false", help="serve Python clients only")


def http_settings_of(options: argparse.Namespace) -> HttpSettings | None:
    """Returns the HTTP settings, or None with --no-http.

    Raises:
        InvalidRequest: a value is out of range, the file of keys can't be read, or the extra `serve` is not installed.
    """
    if not options.http:
        return None
    version.require_extra("serve", "HTTP", otherwise="--no-http")
    keys = (*(options.api_keys or ()), *read_api_keys(options.api_key_file))
    return HttpSettings(**{**_given_fields(options, HttpSettings), "api_keys": keys})


def read_api_keys(path: Path | None) -> list[str]:
    """Returns the API keys in a file, if there is one, and in `API_KEY_VARIABLE`.

    Raises:
        InvalidRequest: the file can't be read or has no key.
    """
    in_file = [] if path is None else read_text_file(path, "API keys, one per line").split()
    if path is not None and not in_file:
        raise InvalidRequest(f"{path} contains no API key; expected one per line")
    return in_file + os.environ.get(API_KEY_VARIABLE, "").split()
