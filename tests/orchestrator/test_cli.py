"""The command line without a cluster: exit codes, one sentence per error, and a clean stdout."""

from __future__ import annotations

import argparse
import codecs
import io
import json
import os
import re
import signal
import sys
import threading
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import zmq

from outrider.orchestrator.cli import COMMANDS, Parser, import_command, main
from outrider.orchestrator.cli.flags import read_api_keys
from outrider.orchestrator.cli.serve import status_line
from outrider.orchestrator.cli.terminal import Screen
from outrider.orchestrator.events import Admit, Committed, RequestBegan, RequestEnded
from outrider.orchestrator.machine import system
from outrider.orchestrator.pairing.model_files import PACKAGE_FOLDER, TINY_TARGET
from outrider.protocol.errors import EndpointError, InvalidRequest, ModelError, ProtocolError, WorkerError
from outrider.protocol.messages import Failed, Progress, Stats, Timings
from outrider.protocol.sampling import Grammar, SamplingParams
from outrider.protocol.schema import Logprobs
from outrider.protocol.stats import Report
from outrider.protocol.worker_link import CPU_KERNELS_VARIABLE
from tests.orchestrator.scripted_server import generates, worker_stats


@pytest.fixture
def run(capsys):
    def call(*arguments):
        try:
            code = main(list(arguments))
        except SystemExit as end:
            code = end.code
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


def test_each_error_type_has_its_own_exit_code():
    kinds = (InvalidRequest, ModelError, EndpointError, WorkerError, ProtocolError)
    assert len({kind.exit_code for kind in kinds} | {0, 1}) == len(kinds) + 2


@pytest.fixture(autouse=True)
def executed(monkeypatch):
    """Records commands that would replace the process of the tests, and exits with code 99 instead."""
    commands = []

    def execve(path, command, environment):
        commands.append(command)
        raise SystemExit(99)

    monkeypatch.setattr(os, "execve", execve)
    return commands


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="elsewhere MLX's package brings its library")
@pytest.mark.parametrize("command", ["convert", "bench", "doctor", "completion"])
def test_missing_mlx_backend_is_reported_before_mlx_is_imported(run, monkeypatch, command):
    monkeypatch.setattr(system, "MLX_LIBRARY", Path("lib", "libnone.so"))
    code, out, err = run(command, *(["bash"] if command == "completion" else []))
    assert (code, out) == (InvalidRequest.exit_code, "") and err.count("\n") == 1
    assert err.startswith(f"outrider {command}: MLX has no backend installed") and "pip install '.[cpu]'" in err


def test_worker_command_receives_models_and_endpoint(run, executed, model_folder, endpoint):
    folder = str(model_folder)
    with zmq.Context.instance().socket(zmq.ROUTER) as cluster:
        cluster.bind(endpoint)
        code, _, _ = run("worker", "draft", "--connect", endpoint, "--model", folder, "--draft-model", folder)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT,))  # as the worker does once it can handle the signal
    assert code == 99 and "outrider.draft_worker" in executed[0] and "--parent-fd" not in executed[0]
    assert executed[0][executed[0].index("--endpoint") + 1] == endpoint
    assert executed[0][executed[0].index("--model") + 1] == str(model_folder.resolve())
    assert executed[0][executed[0].index("--log-level") + 1] == "info"  # so the worker logs when it has joined


def actions(text):
    """Returns the entries of a help text as one line each, by their first word."""
    entries = {}
    for line in (re.sub(r"(?<=\S) +", " ", line) for line in text.splitlines()):
        if line.startswith("  ") and line[2:3] not in ("", " "):
            name = re.split(r",? ", line.strip(), maxsplit=1)[0]
            entries[name] = line.strip()
        elif line.startswith("    ") and entries:
            entries[name] += " " + line.strip()
    return entries


COMMANDS_WITH_HELP_ALL = [command for command in COMMANDS if getattr(import_command(command), "COMMON", ())]


@pytest.mark.parametrize("command", ["pairs", "completion", "doctor", "keys", "pull"])
def test_help_all_equals_help_where_help_shows_all_flags(run, command):
    assert run(command, "--help-all") == run(command, "--help")


@pytest.mark.parametrize("command", COMMANDS_WITH_HELP_ALL)
def test_help_shows_some_flags_and_help_all_shows_all(run, command):
    few, every = run(command, "--help")[1], run(command, "--help-all")[1]
    assert f"outrider {command} --help-all shows all flags." in few
    assert len(actions(few)) <= 16 and len(actions(every)) > len(actions(few))
    assert actions(few).items() <= actions(every).items()
    module = import_command(command)
    parser = Parser(prog="x")
    module.add_flags(parser)
    known = {name: action.help for action in parser._actions for name in action.option_strings}
    assert not set(module.COMMON) - known.keys()
    assert not [name for name, help_ in known.items() if help_ is not argparse.SUPPRESS and name not in every]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command != "fleet"])
def test_every_flag_has_help_and_a_default_unless_it_is_required(run, command):
    parser = Parser(prog="x")
    import_command(command).add_flags(parser)
    shown = [action for action in parser._actions if action.help is not argparse.SUPPRESS]
    assert all(action.help for action in shown)
    valued = [action for action in shown if action.option_strings and action.nargs != 0]
    has_default = {action.option_strings[0]: "(default" in action.help for action in valued}
    one_of = [group._group_actions for group in parser._mutually_exclusive_groups if group.required]
    needed = [action for action in valued if action.required or any(action in group for group in one_of)]
    assert has_default == {action.option_strings[0]: action not in needed for action in valued}


@pytest.mark.parametrize("command", COMMANDS)
def test_help_command_prints_the_commands_help(run, command):
    assert run("help", command) == run(command, "--help")
    assert run("help") == run()


@pytest.mark.parametrize("arguments", [[], ["--help"], *([command, "--help"] for command in COMMANDS)])
def test_help_prints_usage_and_exits_with_zero(run, arguments):
    code, out, err = run(*arguments)
    assert code == 0 and "usage: outrider" in out and not err


@pytest.mark.parametrize("arguments", [[], ["pairs"], *([command, "--help"] for command in COMMANDS)])
def test_output_fits_80_columns(run, monkeypatch, arguments):
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(*arguments)
    assert not [
        line for line in out.splitlines() if len(line) > 80 and not line.strip("+ ").startswith(str(PACKAGE_FOLDER))
    ]


@pytest.mark.parametrize("state", ["ready", "starting"])
def test_the_status_line_fits_80_columns(state):
    workers = (worker_stats("target"), worker_stats("draft", state))
    line = status_line(Stats("", "0", workers, 16, 250, 123456, 42, Timings(), 0, 0), 1234.5)
    assert len(line) < 80
    assert ("draft-0 starting" in line) is (state == "starting")


def test_version_is_printed(run):
    assert run("--version")[1].startswith("outrider ")


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["bake"], 2, "unknown command 'bake'; expected one of generate"),
        (["help", "bake"], 2, "unknown command 'bake'; expected one of generate"),
        (["genrate", "-p", "x", "--seed", "3"], 2, "unknown command 'genrate' (did you mean generate?); see"),
        (["--mode", "ar", "generate"], 2, "expected a command before --mode; see outrider --help"),
        (
            ["generate", "x", "--model", "smolm2"],
            3,
            "no such path: smolm2; expected a name (smollm2 or",
        ),
        (["--version", "generate"], 2, "unexpected argument 'generate'"),
        (["generate", "-p"], 2, "expected one argument"),
        (["generate", "-p", "--json"], 2, "expected one argument"),
        (["worker", "draft", "--connect", "ipc:///tmp/no/such"], 4, "no server at ipc:///tmp/no/such"),
        (["generate", "-p", "x", "--connect", "ipc:///tmp/no/such"], 4, "no server at ipc:///tmp/no/such"),
        (["generate"], 2, "there is no prompt; expected PROMPT (- is stdin), or --chat"),
        (["generate", "-p", "x", "--temp", "hot"], 2, "argument --temp/--temperature: invalid float value: 'hot'; see"),
        (["generate", "-p", "x", "-n", "1.5"], 2, "argument --max-tokens/-m/-n: invalid int value: '1.5'"),
        (["serve", "--branches", "many"], 2, "argument --branches: invalid int value: 'many'"),
        (["bench", "--rounds", "x"], 2, "argument --rounds: invalid int value: 'x'"),
        (["generate", "-p", "x", "--tem", "1"], 2, "unknown flag --tem (did you mean --temp?)"),
        (["generate", "x", "--max_tokens", "1"], 2, "unknown flag --max_tokens (did you mean --max-tokens?)"),
        (["generate", "x", "--maxtokens=1"], 2, "unknown flag --maxtokens (did you mean --max-tokens?)"),
        (["generate", "x", "--zzz"], 2, "unknown flag --zzz; see outrider generate --help"),
        (["generate", "def", "f():"], 2, "unexpected argument 'f():'; a text of several words needs quotes"),
        (["generate", "--", "-x", "-m", "3"], 2, "unexpected argument '-m'; a text of several words needs quotes"),
        (["generate", "--", "what", "--this"], 2, "unexpected argument '--this'; a text of several words needs"),
        (["serve", "x"], 2, "unexpected argument 'x'; see outrider serve --help"),
        (["generate", "x", "-p", "y"], 2, "argument PROMPT: not allowed with argument --prompt/-p"),
        (["generate", "x", "--json-schema", '{"type": '], 2, "expected JSON"),
        (["generate", "x", "--json-schema", "/no/such"], 2, "expected a file with a JSON Schema, or the schema"),
        (["generate", "-p", ""], 2, "prompt is empty"),
        (["generate", "-p", "x", "-m", "0"], 2, "max_tokens is 0"),
        (["generate", "-p", "x", "--temp", "-1"], 2, "temp is -1.0"),
        (["generate", "-p", "x", "--top-p", "2"], 2, "top_p is 2.0"),
        (["generate", "-p", "x", "--logit-bias", "[1]"], 2, "JSON object"),
        (["generate", "-p", "x", "--logit-bias", "[" * 99999], 2, "JSON object"),
        (["generate", "-p", "x", "--logit-bias", f'{{"1": {"9" * 400}}}'], 2, "JSON object"),
        (["generate", "-p", "x", "--logprobs", "2"], 2, "--logprobs needs --json"),
        (["generate", "--chat", str(PACKAGE_FOLDER)], 2, "can't be read (Is a directory); expected a JSON list"),
        (["generate", "-p", "x", "--num-draft-tokens", "0"], 2, "num_draft_tokens is 0"),
        (["generate", "-p", "x", "--num-draft-tokens", "1000"], 2, "from 1 to 32"),
        (["generate", "-p", "x", "--mode", "fast"], 2, "expected one of auto, ar, sd, ssd"),
        (["generate", "-p", "x", "--draft-backend", "gpu"], 2, "draft_backend is 'gpu'"),
        (["generate", "-p", "x", "--connect", "nowhere"], 4, "not an endpoint"),
        (["generate", "-p", "x", "--connect", "http://127.0.0.1:8080"], 4, "is an HTTP address"),
        (["chat", "--connect", "https://studio.local/v1"], 4, "that `outrider serve` prints as `clients:`"),
        (
            ["generate", "-p", "x", "--connect", "ipc:///tmp/x", "--model", "m"],
            2,
            "--model can't be used with --connect",
        ),
        (["generate", "x", "--connect", "ipc:///tmp/x", "--no-ngrams"], 2, "--no-ngrams can't be used with --connect"),
        (
            ["generate", "x", "--connect", "ipc:///tmp/x", "--draft-model", "d"],
            2,
            "--draft-model can't be used with --connect",
        ),
        (["serve", "--model", "/no/such"], 3, "no such path"),
        (["serve", "--mode", "fast"], 2, "mode is 'fast'"),
        (["serve", "--host", "0.0.0.0"], 2, "needs an API key"),
        (["serve", "--cors-origin", "http://["], 2, "cors_origin is 'http://['; expected an origin such as"),
        (["serve", "--api-key-file", "/no/such"], 2, "/no/such can't be read"),
        (["worker", "cook", "--connect", "ipc:///x"], 2, "invalid choice"),
        (["worker", "draft", "--connect", "nowhere"], 4, "not an endpoint"),
        (["worker", "draft", "--connect", "ipc:///x", "--draft-backend", "ngram"], 2, "ngram has no draft worker"),
        (["worker", "draft", "--connect", "ipc:///x", "--colocate"], 2, "colocate has no draft worker; expected mlx"),
        (["worker", "draft", "--connect", "ipc:///x", "--draft-backend", "mtp"], 2, "mtp has no draft worker"),
        (["serve", "--drafters", "2", "--colocate"], 2, "drafters is 2, but colocate starts no draft workers"),
        (
            ["serve", "--drafters", "2", "--draft-backend", "mtp"],
            2,
            "drafters is 2, but draft_backend mtp starts no draft workers",
        ),
        (["serve", "--draft-device", "cpu", "--draft-backend", "mtp"], 2, "but draft_backend mtp starts none"),
        (["generate", "-p", "x", "--colocate", "--mode", "ssd"], 2, "mode ssd needs a drafter that works while"),
        (["generate", "-p", "x", "--colocate", "--draft-backend", "none"], 2, "can't use draft_backend none"),
        (["overlap", "--colocate"], 2, "unknown flag --colocate"),
        (["overlap", "--trace", "x"], 2, "unknown flag --trace"),
        (["worker", "draft", "--connect", "ipc:///x", "--max-active", "2"], 2, "unknown flag --max-active"),
        (["worker", "draft", "--connect", "ipc:///x", "--kv-memory", "2GB"], 2, "unknown flag --kv-memory"),
        (["tune", "--head-in", "draft-worker"], 2, "unknown flag --head-in"),
        (["tune", "--max-waiting", "3"], 2, "unknown flag --max-waiting"),
        (["tune", "--colocate"], 2, "unknown flag --colocate"),
        (["tune", "--ngram-table", "x"], 2, "unknown flag --ngram-table"),
        (["bench", "--colocate"], 2, "unknown flag --colocate"),
        (["overlap", "--drafters", "2"], 2, "unknown flag --drafters"),
        (["bench", "--no-ngrams"], 2, "unknown flag --no-ngrams"),
        (["bench", "--head-in", "target"], 2, "unknown flag --head-in"),
        (["chat", "--logprobs", "2"], 2, "unknown flag --logprobs"),
        (["verify", "--logprobs", "2"], 2, "unknown flag --logprobs"),
        (["generate", "x", "--await-target"], 2, "unknown flag --await-target"),
        (["serve", "--drafter", "ngram"], 2, "unknown flag --drafter"),
        (["overlap", "--draft-backend", "mtp"], 2, "a head (mtp) and the target take turns"),
        (["overlap", "--draft-backend", "ngram"], 2, "overlap needs a draft model"),
        (["pairs", "one"], 2, "expected a target and a draft model"),
        (["pairs", "/no/such", "/no/such"], 3, "no such path"),
        (["verify", "/no/such"], 2, "No such file or directory); expected the output"),
        (["verify", str(PACKAGE_FOLDER / "__init__.py")], 2, "is not a JSON object (Expected"),
        (["verify", "/no/such", "--cpu-kernels", "x"], 2, "cpu_kernels is 'x'; expected one of auto"),
        (["verify"], 2, "the following arguments are required: FILE"),
        (["doctor", "--log-level", "x"], 2, "log_level is 'x'; expected one of debug"),
    ],
)
def test_mistake_prints_one_sentence_and_exits_with_its_code(run, arguments, code, words):
    got, out, err = run(*arguments)
    assert (got, out) == (code, "") and words in err
    assert err.startswith("outrider") and len(err.strip().splitlines()) == 1 and "Traceback" not in err


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8])
def test_api_keys_are_read_with_or_without_a_byte_order_mark(tmp_path, monkeypatch, mark):
    """Editors on Windows write one. If it were part of the first key, that key would admit nobody."""
    monkeypatch.delenv("OUTRIDER_API_KEY", raising=False)
    (tmp_path / "keys").write_bytes(mark + b"one\r\ntwo\r\n")
    assert read_api_keys(tmp_path / "keys") == ["one", "two"]


def test_generate_writes_only_text_to_stdout(run, server, codec):
    server.core.on_admit = generates(codec, "return 1\n")
    code, out, err = run("generate", "-p", "def f(", "--connect", server.endpoint, "--seed", "5", "--stop", "zz")
    assert (code, out) == (0, "return 1\n\n")
    assert [line.split(":")[0] for line in err.splitlines()] == ["Prompt", "Generation", "Speculation"]
    assert server.core.wait_for(Admit)[0].sampling == SamplingParams(seed=5, stop=("zz",))


def test_json_output_is_one_object_with_the_result_and_what_verify_needs(run, server, codec):
    server.core.on_admit = generates(codec, "x = 'é'", "length")
    code, out, err = run("generate", "-p", "def f(", "--connect", server.endpoint, "--json", "--seed", "5")
    found = json.loads(out)
    assert code == 0 and err == ""
    assert found.keys() == {
        "text", "token_ids", "prompt_tokens", "finish_reason", "mode", "seed", "model", "draft_model", "notes",
        "logprobs", "origins", "prompt_logprobs", "prompt", "chat_template", "sampling", "timings",
    }  # fmt: skip
    assert found["timings"].keys() == set(Timings.__struct_fields__)
    assert (found["text"], found["finish_reason"], found["seed"]) == ("x = 'é'", "length", 5)
    assert found["prompt_tokens"] == len(codec.encode("def f("))


def test_json_says_whether_the_chat_template_was_to_be_used(run, server, codec):
    server.core.on_admit = generates(codec, "x")
    for flags, expected in (((), True), (("--ignore-chat-template",), False)):
        _, out, _ = run("generate", "-p", "x", "--connect", server.endpoint, "--json", *flags)
        assert json.loads(out)["chat_template"] is expected


@pytest.mark.parametrize("arguments", [("from", "--seed", "5"), ("--seed", "5", "from")])
def test_the_prompt_may_be_an_argument(run, server, codec, arguments):
    server.core.on_admit = generates(codec, "x")
    assert run("generate", *arguments, "--connect", server.endpoint)[0] == 0
    assert server.core.wait_for(Admit)[0].tokens == codec.encode("from")


@pytest.mark.parametrize(
    ("limit", "prompt", "words"),
    [
        (None, "x", "Note: the text was cut off after 3 tokens (--max-tokens)"),
        ("2000", "x", "Note: the text was cut off because the context is full ("),
    ],
)
def test_cut_off_text_prints_a_note_with_the_reason(run, server, codec, limit, prompt, words):
    tokens = codec.encode("def f(x): return 1", special=False)[:3]
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"),
        Committed(admit.request, tokens),
        RequestEnded(admit.request, "length", Timings(predicted_n=3)),
    ]
    code, _, err = run("generate", prompt, "--connect", server.endpoint, "-m", limit or "3")
    assert code == 0 and err.splitlines()[-1].startswith(words)
    server.core.on_admit = generates(codec, "x", "eos")
    assert "cut off" not in run("generate", prompt, "--connect", server.endpoint, "-m", "3")[2]


@pytest.mark.parametrize("text", ["", "x = 1"])
def test_error_begins_a_line_after_progress_and_text(run, server, codec, monkeypatch, text):
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"),
        Progress(admit.request, 512, 751),
        *([Committed(admit.request, codec.encode(text, special=False))] if text else []),
        Failed(admit.request, "WorkerError", "the target died"),
    ]
    code, out, err = run("generate", "x", "--connect", server.endpoint)
    assert code == WorkerError.exit_code and out == (f"{text}\n" if text else "")
    assert "512 of 751 tokens\r\x1b[K" in err and err.endswith("\x1b[Koutrider generate: the target died\n")


def test_start_progress_is_one_erased_line_on_terminals_only(capsys, monkeypatch):
    piped = Screen()
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")  # a terminal that can't erase, such as Emacs' shell
    for lines_only in (piped, Screen()):
        lines_only.show("target: loading")
        lines_only.clear()
    assert capsys.readouterr().err == ""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "20")
    live = Screen()
    for stage in ("target: loading", "draft: loading something with a long name"):
        live.show(stage)
    live.clear()
    err = capsys.readouterr().err
    assert "\n" not in err and err.endswith("\r\x1b[K") and "a long name" not in err


def test_the_prompt_may_come_from_stdin(run, server, codec, monkeypatch):
    server.core.on_admit = generates(codec, "x")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert run("generate", "-p", "-", "--connect", server.endpoint)[0] == 0
    assert server.core.wait_for(Admit)[0].tokens == codec.encode("from stdin")


@pytest.mark.parametrize("text", ["-x", "---", "-1", "--no-such-flag", "-- a comment", "-"])
@pytest.mark.parametrize("flag", ["-p", "--prompt"])
def test_a_prompt_may_begin_with_a_dash(run, server, codec, monkeypatch, flag, text):
    server.core.on_admit = generates(codec, "x")
    monkeypatch.setattr("sys.stdin", io.StringIO("from stdin"))
    assert run("generate", flag, text, "--stop", "-y", "--connect", server.endpoint)[0] == 0
    admit = server.core.wait_for(Admit)[0]
    assert admit.tokens == codec.encode("from stdin" if text == "-" else text)
    assert admit.sampling.stop == ("-y",)


def test_common_flag_aliases_are_accepted(run, server, codec):
    server.core.on_admit = generates(codec, "x")
    run(
        "generate",
        "-p",
        "x",
        "--connect",
        server.endpoint,
        "--temperature",
        "0.5",
        "-n",
        "9",
        "--frequency-penalty",
        "-1e-1",
    )
    sampling = server.core.wait_for(Admit)[0].sampling
    assert (sampling.temp, sampling.max_tokens, sampling.frequency_penalty) == (0.5, 9, -0.1)


def test_server_refusal_sets_the_exit_code(run, server):
    code, out, err = run("generate", "-p", "x " * 3000, "--connect", server.endpoint)
    assert (code, out) == (2, "") and "> 1023 maximum" in err


def test_every_sampling_flag_reaches_the_core(run, server, codec):
    server.core.on_admit = generates(codec, "x")
    run(
        "generate", "-p", "x", "--connect", server.endpoint, "--max-tokens", "9", "--min-tokens", "2",
        "--temp", "0.5", "--top-p", "0.9",
        "--min-p", "0.1", "--top-k", "7", "--seed", "3", "--repetition-penalty", "1.5",
        "--repetition-context-size", "4", "--presence-penalty", "0.5", "--frequency-penalty", "0.25",
        "--presence-context-size", "5", "--frequency-context-size", "6", "--logit-bias", '{"11": -5}', "--ignore-eos",
        "--stop", "end", "--stop", "quit", "--sampling", "residual", "--saguaro", "0.5", "--q-width", "50",
        "--mode", "sd", "--num-draft-tokens", "2", "--branches", "6", "--logprobs", "3", "--json",
    )  # fmt: skip
    admit = server.core.wait_for(Admit)[0]
    assert admit.sampling == SamplingParams(
        max_tokens=9, min_tokens=2, temp=0.5, top_p=0.9, min_p=0.1, top_k=7, seed=3, repetition_penalty=1.5,
        repetition_context_size=4, presence_penalty=0.5, presence_context_size=5, frequency_penalty=0.25,
        frequency_context_size=6, logit_bias=((11, -5.0),), ignore_eos=True, stop=("end", "quit"), rule="residual",
        saguaro=0.5, q_width=50, logprobs=3,
    )  # fmt: skip
    found, default = admit.sampling, SamplingParams()
    unchanged = [f.name for f in fields(found) if getattr(found, f.name) == getattr(default, f.name)]
    others = set(unchanged) - {"grammar", "prompt_logprobs"}  # one has a test of its own, the other has no flag
    assert not others, f"{others}: add a flag to flags.add_sampling_flags, and use it above"
    assert (admit.mode, admit.num_draft_tokens, admit.branches) == ("sd", 2, 6)


def test_pairs_lists_models_and_checks_a_pair(run, model_folder):
    code, out, _ = run("pairs")
    assert code == 0 and "Qwen3-0.6B" in out and "models/target" in out
    code, out, _ = run("pairs", str(model_folder), str(model_folder))
    assert code == 0 and "fits: both have the same 4094 tokens, besides names in brackets" in out


def test_one_interrupt_ends_a_stream(server, codec, monkeypatch, run):
    def interrupt(*_):
        raise KeyboardInterrupt

    server.core.on_admit = generates(codec, "x")
    monkeypatch.setattr("outrider.orchestrator.cli.generate.Screen.clear", interrupt)
    assert run("generate", "-p", "x", "--connect", server.endpoint) == (130, "", "")
    assert threading.active_count() < 20


@pytest.fixture
def output(run, server, codec, tmp_path):
    """Returns the object that `generate --json` printed, and the file with it."""
    server.core.on_admit = generates(codec, "x = 'é'", "length")
    length = len(codec.encode("x = 'é'", special=False))
    arguments = ("--temp", "0.5", "--seed", "5", "--logit-bias", '{"11": -5}', "--stop", "zz", "-m", str(length))
    code, out, _ = run("generate", "-p", "def f(", "--connect", server.endpoint, "--json", *arguments)
    assert code == 0
    file = tmp_path / "output.json"
    file.write_text(out)
    return json.loads(out), file


@pytest.fixture
def replays(monkeypatch):
    """Records the arguments of each replay, and reports that every token is the target's."""
    recorded = []

    def certify(claim, progress, kernels):
        recorded.append((Path(claim.model), claim.tokens, claim.generated, claim.sampling))
        return Report(len(claim.generated), len(claim.generated), (), (), 1024)

    monkeypatch.setattr("outrider.orchestrator.cli.verify.certify", certify)
    return recorded


def test_verify_takes_model_prompt_and_sampling_from_the_file(run, codec, output, replays):
    found, file = output
    code, out, err = run("verify", str(file))
    assert (code, err) == (0, "") and out.endswith("0 mismatches: certified\n")
    expected = SamplingParams(
        temp=0.5, seed=5, logit_bias=((11, -5.0),), stop=("zz",), max_tokens=len(found["token_ids"])
    )
    assert replays == [(TINY_TARGET, codec.encode("def f("), tuple(found["token_ids"]), expected)]


def test_grammar_and_logprobs_round_trip_through_json(run, server, codec, tmp_path, replays):
    tokens = codec.encode("12", special=False)
    rows = Logprobs(np.array([[t, t] for t in tokens], np.int32), np.full((len(tokens), 2), -0.25, np.float32))
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"), Committed(admit.request, tokens, rows),
        RequestEnded(admit.request, "length", Timings(predicted_n=len(tokens))),
    ]  # fmt: skip
    file, schema = tmp_path / "output.json", tmp_path / "schema.json"
    schema.write_text('{"type": "integer"}')
    flags = ("-p", "x", "--connect", server.endpoint, "--json", "-m", str(len(tokens)), "--logprobs", "1")
    code, out, _ = run("generate", *flags, "--json-schema", str(schema))
    first = {"token": tokens[0], "logprob": -0.25, "top": [[tokens[0], -0.25]]}
    assert code == 0 and json.loads(out)["logprobs"][0] == first
    file.write_text(out)
    assert run("verify", str(file))[0] == 0
    assert (
        replays[0][3].grammar == Grammar.json_schema('{"type": "integer"}') == server.core.received[0].sampling.grammar
    )
    run("generate", *flags, "--json-schema", ' {"type": "integer"}')
    assert server.core.received[1].sampling.grammar == Grammar.json_schema('{"type": "integer"}')
    run("generate", *flags, "--regex", "[0-9]+")
    assert server.core.received[2].sampling.grammar == Grammar("regex", "[0-9]+")
    assert run("generate", *flags, "--grammar", str(tmp_path / "none"))[0] == 2


@pytest.mark.parametrize("ignored", [True, False])
def test_verify_replays_end_tokens_as_the_server_does(run, codec, output, monkeypatch, ignored):
    """If end tokens are ignored, `min_tokens` must not exclude them."""
    found, file = output
    found["sampling"] |= {"ignore_eos": ignored, "min_tokens": 2}
    file.write_text(json.dumps(found))
    replayed = []
    monkeypatch.setattr(
        "outrider.orchestrator.cli.verify.certify", lambda *given: replayed.append(given) or Report(1, 1, (), (), 99)
    )
    assert run("verify", str(file))[0] == 0
    assert set(replayed[0][0].ends) == (set() if ignored else codec.eos)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"text": "x = 'e'"}, "text differs from its tokens"),
        ({"text": ""}, "text differs from its tokens"),
        ({"token_ids": []}, "ends after 0 tokens"),
        ({"finish_reason": "eos"}, "is eos, but it ends with length"),
    ],
)
def test_verify_detects_a_changed_file(run, output, replays, changes, fault):
    found, file = output
    file.write_text(json.dumps({**found, **changes}))
    code, out, _ = run("verify", str(file))
    assert code == 1 and "NOT the target's output" in out and fault in out
    code, out, _ = run("verify", str(file), "--json")
    report = json.loads(out)
    assert (code, report["certified"], report["mismatches"]) == (1, False, []) and fault in " ".join(report["faults"])


@pytest.mark.parametrize(
    "changes",
    [
        {"text": None}, {"token_ids": 5}, {"prompt": 7}, {"sampling": []}, {"sampling": {"heat": 1}}, {"seed": "x"},
        {"sampling": {"temp": -1}}, {"prompt_tokens": None}, {"prompt": None}, {"model": 3}, {"prompt_tokens": 999},
    ],
)  # fmt: skip
def test_verify_refuses_a_file_that_is_not_an_output(run, output, replays, changes):
    found, file = output
    file.write_text(json.dumps({**found, **changes}))
    code, out, err = run("verify", str(file))
    assert (code, out) == (InvalidRequest.exit_code, "") and len(err.splitlines()) == 1 and "expected" in err


@pytest.mark.parametrize("name", ["model", "seed"])
def test_verify_names_what_a_file_lacks(run, output, replays, name):
    found, file = output
    del found[name]
    file.write_text(json.dumps(found))
    assert f"can't be used (it has no '{name}'); expected the output of" in run("verify", str(file))[2]


def test_verify_takes_another_folder_of_the_model(run, output, replays, tmp_path):
    found, file = output
    file.write_text(json.dumps({**found, "model": "/no/such"}))
    assert run("verify", str(file))[0] == ModelError.exit_code
    assert run("verify", str(file), "--model", "tiny")[0] == 0


@pytest.mark.parametrize(("flags", "kernels"), [((), "unset"), (("--cpu-kernels", "mlx"), "mlx")])
def test_verify_replays_with_the_cpu_kernels_of_its_flag(run, output, monkeypatch, flags, kernels):
    replay = f"import json, os; chosen = os.environ.get({CPU_KERNELS_VARIABLE!r}, 'unset')"
    replay += "; print(json.dumps({'kind': 'InvalidRequest', 'error': chosen}))"
    monkeypatch.delenv(CPU_KERNELS_VARIABLE, raising=False)
    monkeypatch.setattr("outrider.orchestrator.cli.verify.python", lambda *_: (sys.executable, "-c", replay))
    assert run("verify", str(output[1]), *flags) == (2, "", f"outrider verify: {kernels}\n")


def test_verify_refuses_residual_sampling(run, output):
    found, file = output
    found["sampling"] |= {"temp": 1.0, "rule": "residual"}
    file.write_text(json.dumps(found))
    code, out, err = run("verify", str(file))
    assert (code, out) == (InvalidRequest.exit_code, "")
    assert err == (
        "outrider verify: residual sampling can't be replayed: its text may differ each"
        " time; expected coupled sampling\n"
    )


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (("--sampling", "exact"), "sampling rule is 'exact'; expected one of coupled, residual"),
        (("--sampling", "residual", "--saguaro", "0"), "saguaro is 0.0; expected a number from 0.01 to 1"),
        (("--saguaro", "0.5"), "saguaro is 0.5; it needs rule residual, or must be 1"),
        (("--sampling", "residual", "--q-width", "0"), "q_width is 0; expected a whole number from 1 to 1024"),
    ],
)
def test_settings_of_residual_sampling_are_checked(run, flags, sentence):
    code, out, err = run("generate", "--prompt", "x", *flags)
    assert (code, out, err) == (InvalidRequest.exit_code, "", f"outrider generate: {sentence}\n")
