"""Flags that several commands share, and the records they become. Names are mlx-lm's where mlx-lm has the flag.

The flags of a cluster are made from `ServeSettings`, field by field.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from outrider.orchestrator import settings
from outrider.orchestrator.http_settings import HOST, MAX_BODY_MB, PORT, HttpSettings
from outrider.orchestrator.pairing.pulled import OFFLINE
from outrider.orchestrator.settings import LOG_LEVELS, ServeSettings
from outrider.protocol import version
from outrider.protocol.errors import InvalidRequest
from outrider.protocol.process import set_up
from outrider.protocol.sampling import PRESETS, RULES, Grammar, SamplingParams


def read_text_file(path: Path, expected: str) -> str:
    """All of it. Raises InvalidRequest: it can't be read; `expected` goes on "expected"."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidRequest(f"{path} can't be read ({error.strerror}); expected {expected}") from None
    except UnicodeDecodeError:
        raise InvalidRequest(f"{path} can't be read (it is not UTF-8); expected {expected}") from None


_DEFAULTS = ServeSettings()
_SAMPLING = SamplingParams()
OF_MANY_REQUESTS = ("max_active", "max_waiting", "await_target")
"""What makes no difference to a cluster that one person asks, or one that nobody else can join."""


def add_request_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """How one request is run; they hold for a server that is running already, too. `without`: see `_adder`."""
    one = "use this drafter only: draft, ngram, or a head such as eagle3 or mtp (default: all)"
    add_settings(
        parser, settings.SPECULATION, without, num_draft_tokens=("--drafter", {"metavar": "NAME", "help": one})
    )


def add_cluster_flags(parser: argparse.ArgumentParser, without: Collection[str] = ()) -> None:
    """What a cluster is started with. `without`: see `_adder`."""
    local = "download nothing: use what is on this machine (as HF_HUB_OFFLINE=1 does)"
    offline = ("--offline", {"action": _Offline, "nargs": 0, "help": local})
    add_settings(parser, settings.MODELS, without, draft_model=offline)
    for group in (settings.DRAFTING, settings.WORKERS, settings.MEMORY, settings.LOGS):
        add_settings(parser, group, without)


def add_settings(
    parser: argparse.ArgumentParser, group: str, without: Collection[str] = (), **then: tuple[str, dict[str, Any]]
) -> Callable[..., None]:
    """The flags of a group of `ServeSettings`, and what adds more to it; `then`: a flag that follows this setting's."""
    add = _adder(parser, group, without)
    for field in dataclasses.fields(ServeSettings):
        if field.metadata["group"] == group:
            add_setting(add, field.name)
            if field.name in then:
                add(then[field.name][0], **then[field.name][1])
    return add


def add_setting(add: Callable[..., object], name: str) -> None:
    """The flag of one setting, by a parser's or a group's `add_argument`."""
    field = ServeSettings.__dataclass_fields__[name]
    flag, kind, said = name.replace("_", "-"), field.metadata["type"], field.metadata["help"]
    options: dict[str, Any] = {"help": said.format(default=field.default)}
    if kind is bool and field.default:
        add(f"--no-{flag}", dest=name, action="store_false", default=None, **options)
    elif kind is bool:
        add(f"--{flag}", action="store_true", default=None, **options)
    else:
        options |= {"metavar": field.metadata["metavar"]} | ({"type": kind} if kind is not None else {})
        add(f"--{flag}", **options | ({"action": "append"} if isinstance(field.default, tuple) else {}))


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
    set_up(level, getattr(options, "log_format", None) or _DEFAULTS.log_format, process)


def _given(options: argparse.Namespace, record: type[Any]) -> dict[str, Any]:
    names = [field.name for field in dataclasses.fields(record)]
    return {name: value for name in names if (value := getattr(options, name, None)) is not None}


def _grammar(options: argparse.Namespace) -> Grammar | None:
    if options.regex is not None:
        return Grammar("regex", options.regex)
    if options.lark is not None:
        return Grammar("grammar", read_text_file(options.lark, "a text file"))
    if options.json_schema is None:
        return None
    if options.json_schema.lstrip().startswith("{"):
        return Grammar.json_schema(options.json_schema.strip())
    return Grammar.json_schema(read_text_file(Path(options.json_schema), "a file with a JSON Schema, or the schema"))


def _preset(name: str) -> str:
    return f"{name}: " + " ".join(f"{field.replace('_', '-')} {value:g}" for field, value in PRESETS[name].items())


def _bias(text: str) -> tuple[tuple[int, float], ...]:
    try:
        pairs = json.loads(text)
        return tuple((int(token), float(bias)) for token, bias in pairs.items())
    except (ValueError, AttributeError, TypeError):
        raise InvalidRequest(f'logit_bias is {text!r}; expected a JSON object like {{"11": -5.0}}') from None


def writable_folder(path: Path, instead: str) -> Path:
    """The folder itself; `instead` is the advice where it can't be used.

    Raises:
        InvalidRequest: nothing can be written there.
    """
    try:
        path.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise InvalidRequest(f"nothing can be written to {path}: {error.strerror}; {instead}") from None


KEY_VARIABLE = "OUTRIDER_API_KEY"


def add_http_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("HTTP")
    host = f"address to listen at; beyond loopback with --api-key (default: {HOST})"
    group.add_argument("--host", default=HOST, metavar="ADDRESS", help=host)
    group.add_argument("--port", type=int, default=PORT, help=f"port to listen at; 0: any free one (default: {PORT})")
    group.add_argument("--no-http", dest="http", action="store_false", help="serve Python clients only")
    key = f"a key that clients must send; repeatable (default: {KEY_VARIABLE} in the environment, else none)"
    group.add_argument("--api-key", dest="api_keys", action="append", default=[], metavar="KEY", help=key)
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="API keys, one a line (default: none)")
    name = "a name for the model in requests; repeatable (default: its id or folder)"
    group.add_argument(
        "--served-model-name", dest="model_names", action="append", default=[], metavar="NAME", help=name
    )
    origin = "web pages that may ask from a browser, or *; repeatable (default: none)"
    group.add_argument("--cors-origin", dest="cors_origins", action="append", default=[], metavar="ORIGIN", help=origin)
    group.add_argument(
        "--tls-cert", metavar="FILE", help="certificate (PEM), to serve HTTPS with --tls-key (default: HTTP)"
    )
    group.add_argument("--tls-key", metavar="FILE", help="private key (PEM) of --tls-cert (default: none)")
    body = f"largest request that is accepted (default: {MAX_BODY_MB})"
    group.add_argument("--max-body-mb", type=int, default=MAX_BODY_MB, metavar="MB", help=body)
    late = "an answer that takes longer is cancelled (default: no limit)"
    group.add_argument("--request-timeout", type=int, metavar="SECONDS", help=late)
    many = "answers at once for each API key, or client address if no key is sent (default: no limit)"
    group.add_argument("--max-streams-per-key", type=int, metavar="N", help=many)
    spans = "where traces go, like http://127.0.0.1:4318 (default: OTEL_... in the environment)"
    worded = "refuse tools for a model whose chat template has none, instead of describing them in the system prompt"
    group.add_argument("--no-tool-fallback", dest="tool_fallback", action="store_false", help=worded)
    group.add_argument("--otlp-endpoint", metavar="URL", help=spans)


def http_settings_of(options: argparse.Namespace) -> HttpSettings | None:
    """None when no HTTP is wanted.

    Raises:
        InvalidRequest: a value is out of range, the file of keys can't be read, or what serves HTTP is not installed.
    """
    if not options.http:
        return None
    version.require("serve", "HTTP", otherwise="--no-http")
    given: dict[str, Any] = {field.name: getattr(options, field.name) for field in dataclasses.fields(HttpSettings)}
    given["api_keys"] = [*options.api_keys, *keys_in(options.api_key_file), *keys_in_environment()]
    lists = {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return HttpSettings(**given | lists)


def keys_in(path: Path | None) -> list[str]:
    """A file's API keys. Raises InvalidRequest where it can't be read or has none."""
    if path is None:
        return []
    keys = read_text_file(path, "API keys, one a line").split()
    if not keys:
        raise InvalidRequest(f"{path} contains no API key; expected one per line")
    return keys


def keys_in_environment() -> list[str]:
    """Those of the variable."""
    return os.environ.get(KEY_VARIABLE, "").split()
