"""`outrider chat` with a scripted server: its requests, its output, and saved conversations."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import termios
from collections import Counter
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest
from msgspec.structs import replace

from outrider.orchestrator.cli import chat, main
from outrider.orchestrator.cli.chat import ORIGINS, RESET_COLOUR
from outrider.orchestrator.events import (
    Admit,
    Committed,
    RequestBegan,
    RequestEnded,
    Stop,
    WorkersChanged,
)
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pairing.chat_template import render_template
from outrider.orchestrator.pairing.model_files import TINY_TARGET, find_model
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.messages import Failed, Progress, Timings
from outrider.protocol.schema import Origin
from outrider.protocol.stats import Report
from tests.orchestrator.scripted_server import generates, worker_stats

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class Terminal(io.StringIO):
    """The stdin of a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def server(make_server):
    """A server whose target reports the folder of its model, as a worker does."""
    server = make_server(max_active=1)
    target = replace(worker_stats("target"), model=str(TINY_TARGET))
    server.queues.events.put(WorkersChanged((target, worker_stats("draft"))))
    return server.start(ready=False)


@pytest.fixture
def talk(server, monkeypatch, capsys):
    """`talk("line", ..., flags=(...))` runs a chat with these lines as input -> exit code, stdout, stderr."""

    def call(*lines, flags=(), is_terminal=True):
        given = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", Terminal(given) if is_terminal else io.StringIO(given))
        code = main(["chat", "--connect", server.endpoint, *flags])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def with_template(monkeypatch):
    monkeypatch.setattr("outrider.orchestrator.pairing.tokenizer.chat_template", lambda folder: TEMPLATE)


def prompts(server):
    return [server.codec.decode(event.tokens) for event in server.core.received if isinstance(event, Admit)]


def format_prompt(*turns):
    roles = ("user", "assistant")
    return render_template(TEMPLATE, [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], {})


def test_server_with_a_model_that_this_machine_lacks_is_reported(server, talk, tmp_path):
    target = replace(worker_stats("target"), model=str(tmp_path / "there"))
    server.queues.events.put(WorkersChanged((target,)))
    while server.client().stats().workers[0].model != target.model:
        pass
    code, out, err = talk("hi")
    assert (code, out) == (3, "")
    assert f"the server's model is in {tmp_path}/there on its own machine, and this one needs its tokenizer" in err


def test_each_turn_sends_the_whole_conversation(server, talk, with_template):
    server.core.on_admit = generates(server.codec, "yes")
    code, out, err = talk("one", "two", "/undo", "three", "/clear", "four", "/quit", "never said")
    assert code == 0 and out.count("yes\n") == 4 and err.count("tok/s") == 4
    expected = [
        format_prompt("one"),
        format_prompt("one", "yes", "two"),
        format_prompt("one", "yes", "three"),
        format_prompt("four"),
    ]
    assert prompts(server) == expected


@pytest.mark.parametrize(
    ("flags", "temp", "top_p"),
    [((), 0.6, 0.9), (("--temp", "0"), 0.0, 0.9), (("--top-p", "1"), 0.6, 1.0)],
)
def test_sampling_is_the_models_own_unless_flags_say_otherwise(
    server, talk, with_template, monkeypatch, flags, temp, top_p
):
    own = {"temp": 0.6, "top_p": 0.9}
    monkeypatch.setattr("outrider.orchestrator.cli.chat.read_default_sampling", lambda folder: own)
    server.core.on_admit = generates(server.codec, "yes")
    assert talk("one", flags=flags)[0] == 0
    (sampling,) = [event.sampling for event in server.core.received if isinstance(event, Admit)]
    assert (sampling.temp, sampling.top_p) == (temp, top_p)


@pytest.mark.parametrize("name", ["/quit", "/exit", "/bye"])
def test_quit_exit_and_bye_end_the_chat(server, talk, with_template, name):
    server.core.on_admit = generates(server.codec, "yes")
    code, _, err = talk("one", name, "never said")
    assert code == 0 and "unknown command" not in err and len(prompts(server)) == 1


def test_conversation_that_does_not_fit_on_the_disk_leaves_the_saved_one(server, talk, tmp_path, monkeypatch):
    server.core.on_admit = generates(server.codec, "yes")
    file = tmp_path / "talk.json"
    file.write_text("the old one")
    file.chmod(0o600)

    def full(self, *_):
        raise OSError(27, "File too large")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_bytes", full)
        _, _, err = talk("one", f"/save {file}")
    assert "can't be written (File too large)" in err and file.read_text() == "the old one"
    talk("one", f"/save {file}")
    assert len(json.loads(file.read_text())) == 2 and file.stat().st_mode & 0o777 == 0o600


def test_nothing_to_save_leaves_the_saved_conversation(server, talk, tmp_path):
    """`--chat` would refuse a file with an empty list."""
    file = tmp_path / "talk.json"
    file.write_text("the old one")
    _, _, err = talk(f"/save {file}")
    assert "There is no message to save." in err and file.read_text() == "the old one"


def test_saving_a_conversation_replaces_only_regular_files(server, talk, tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    _, _, err = talk(f"/save {pipe}", flags=("--system-prompt", "Be brief."))
    assert "can't be written (it is not a file); choose another file" in err and pipe.is_fifo()


def test_without_a_template_turns_are_concatenated_with_a_note(server, talk):
    server.core.on_admit = generates(server.codec, "    return 1")
    _, _, err = talk("def f(x):", "print(", is_terminal=False)
    assert prompts(server) == [f"<|endoftext|>{text}" for text in ("def f(x):", "def f(x):    return 1\nprint(")]
    assert err.startswith("Note: this model has no chat template")


def test_conversation_is_saved_and_resumed(server, talk, with_template, tmp_path):
    server.core.on_admit = generates(server.codec, "yes, é")
    file = tmp_path / "talk.json"
    talk("hello", f"/save {file}", flags=("--system-prompt", "Be brief."))
    messages = [("system", "Be brief."), ("user", "hello"), ("assistant", "yes, é")]
    assert json.loads(file.read_text()) == [{"role": role, "content": text} for role, text in messages]
    code, _, _ = talk("/clear", "again", flags=("--chat", str(file)))
    assert (code, prompts(server)[1]) == (0, "<system>Be brief.\n<user>again\n<a>")
    assert main(["chat", "--connect", server.endpoint, "--chat", str(file), "--system-prompt", "x"]) == 2


def test_colors_show_token_origins_and_leave_the_text_unchanged(server, talk):
    tokens = server.codec.encode("def f(x): return 'é☃'\n", special=False)
    origins = tuple(Origin(i % len(Origin)) for i in range(len(tokens)))
    server.core.on_admit = lambda admit: [
        RequestBegan(admit.request, "ssd"),
        *(Committed(admit.request, tokens[i : i + 3], origins=origins[i : i + 3]) for i in range(0, len(tokens), 3)),
        RequestEnded(admit.request, "length", Timings(predicted_n=len(tokens))),
    ]
    _, out, err = talk("x", flags=("--colors",), is_terminal=False)
    assert server.core.received[0].origins
    assert re.sub(r"\x1b\[\d+m", "", out) == "def f(x): return 'é☃'\n\n"
    coloured = {colour: "".join(re.findall(re.escape(colour) + r"(.*?)" + re.escape(RESET_COLOUR), out, re.DOTALL))
                for colour, _ in ORIGINS.values() if colour}  # fmt: skip
    for origin, (colour, _) in ORIGINS.items():
        own = [server.codec.decode((t,)) for t, o in zip(tokens, origins, strict=True) if o is origin]
        if colour and not any("\ufffd" in text for text in own):
            assert coloured[colour] == "".join(own)
    plain = re.sub(r"\x1b\[\d+m", "", err)
    assert Counter({o: int(n) for o in Origin for n in re.findall(rf"(\d+) {ORIGINS[o][1]}", plain)}) == Counter(
        origins
    )
    assert "Colours: " in err


def test_without_colors_origins_are_not_requested_or_shown(server, talk):
    server.core.on_admit = generates(server.codec, "yes")
    _, out, err = talk("x")
    assert not server.core.received[0].origins and "\x1b" not in out + err


def test_interrupt_stops_the_answer_but_not_the_chat(server, talk, with_template, monkeypatch):
    def interrupted(admit):
        if len(prompts(server)) > 1:
            return generates(server.codec, "done")(admit)
        return [
            RequestBegan(admit.request, "ssd"),
            Committed(admit.request, server.codec.encode("half", special=False)),
        ]

    class Interrupting(chat.Painter):
        def paint_chunk(self, chunk):
            print(chunk.text, end="")
            if len(prompts(server)) == 1:
                raise KeyboardInterrupt
            return ""

    server.core.on_admit = interrupted
    monkeypatch.setattr(chat, "Painter", Interrupting)
    code, out, err = talk("one", "two")
    assert code == 0 and "half\n" in out and "done\n" in out and "[stopped]" in err
    assert server.core.wait_for(Stop)[0].reason == "cancelled"
    assert prompts(server)[1] == format_prompt("one", "half", "two")


# The process of the tests may ignore interrupts, as a shell's background jobs do, and a child inherits that.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from outrider.__main__ import main
sys.exit(main(sys.argv[1:]))
"""
READY = b"\x1b[?2004h"
"""Turns on bracketed paste. The line editor writes it when it is ready for a message."""


class ChatProcess:
    """Runs `outrider chat` in a pseudo-terminal."""

    def __init__(self, home, *arguments):
        self._terminal, child_terminal = os.openpty()
        self.initial_attributes = termios.tcgetattr(self._terminal)
        environment = child_environment() | {"XDG_STATE_HOME": str(home), "TERM": "xterm"}
        command = python("-c", INTERRUPTIBLE, "chat", *arguments)
        streams = {"stdin": child_terminal, "stdout": child_terminal, "stderr": child_terminal}
        self.process = subprocess.Popen(command, env=environment, **streams)
        os.close(child_terminal)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)

    def expect(self, words):
        received = b""
        while words not in received:
            assert select.select([self._terminal], [], [], 100)[0], f"no output after {received!r}"
            more = os.read(self._terminal, 4096)
            assert more, f"the output ended after {received!r}"
            received += more
        return received

    def send(self, keys):
        os.write(self._terminal, keys)

    def send_message(self, keys):
        """Sends a message and waits for the end of the answer. Returns the output."""
        self.send(keys + b"\r")
        return self.expect(READY)

    def quit(self):
        self.send(b"/quit\r")
        return self.process.wait(200)

    @property
    def attributes(self):
        return termios.tcgetattr(self._terminal)


@contextmanager
def chat_during_answer(server, home):
    """A chat in the middle of an answer that ends only when it is stopped."""
    half = server.codec.encode("half", special=False)
    server.core.on_admit = lambda admit: [RequestBegan(admit.request, "ssd"), Committed(admit.request, half)]
    with ChatProcess(home, "--connect", server.endpoint) as session:
        session.expect(READY)
        session.send(b"one\r")
        session.expect(b"half")
        yield session


def test_sigint_on_a_terminal_stops_the_answer_and_quit_exits(server, tmp_path):
    with chat_during_answer(server, tmp_path) as session:
        session.process.send_signal(signal.SIGINT)
        session.expect(READY)
        assert session.quit() == 0
    assert server.core.wait_for(Stop)[0].reason == "cancelled"


def test_interrupt_while_the_prompt_is_read_erases_the_progress(server, tmp_path):
    server.core.on_admit = lambda admit: [RequestBegan(admit.request, "ssd"), Progress(admit.request, 512, 751)]
    with ChatProcess(tmp_path, "--connect", server.endpoint) as session:
        session.expect(READY)
        session.send(b"one\r")
        session.expect(b"512 of 751 tokens")
        session.process.send_signal(signal.SIGINT)
        assert session.expect(READY).startswith(b"\r\x1b[KThere was no answer")
        assert session.quit() == 0


def test_wrapped_line_has_no_continuation_prompt(server, tmp_path):
    with ChatProcess(tmp_path, "--connect", server.endpoint) as session:
        session.expect(READY)
        session.send(b"word " * 30 + b"end\\\rnext")
        assert session.expect(b"next").count(b"... ") == 1
        session.process.terminate()
        session.process.wait(200)


def test_multiline_messages_are_sent_and_kept_in_the_history(server, tmp_path):
    server.core.on_admit = generates(server.codec, "yes")
    with ChatProcess(tmp_path, "--connect", server.endpoint) as session:
        session.expect(READY)
        session.send_message(b"\x1b[200~def f():\r\n    a\n/undo\n\x1b[201~")
        assert b"The conversation is cleared." in session.send_message(b"/cl\t")
        session.send_message(b'"""\r/clear\r\rx\r"""')
        session.send_message(b"/clear")
        session.send_message(b'"""/quit"""')
        session.send_message(b"/clear")
        session.send_message(b"one\\\rtwo\x1b\rthree")
        assert session.quit() == 0
    messages = ["def f():\n    a\n/undo\n", "/clear\n\nx", " /quit", "one\ntwo\nthree"]
    assert prompts(server) == [f"<|endoftext|>{text}" for text in messages]
    history = tmp_path / "outrider" / "chat_history"
    assert history.stat().st_mode & 0o777 == 0o600
    with ChatProcess(tmp_path, "--connect", server.endpoint) as session:
        session.expect(READY)
        session.send_message(b"\x1b[A\x1b[A")  # /quit is the newest
        assert prompts(server)[4] == prompts(server)[3]
        session.process.terminate()
        assert session.process.wait(200) == 128 + signal.SIGTERM and session.attributes == session.initial_attributes


def test_interrupt_during_server_start_ends_all_processes_quietly(tmp_path):
    with ChatProcess(tmp_path) as session:
        session.expect(b"target:")
        processes = psutil.Process(session.process.pid).children(recursive=True)
        session.process.send_signal(signal.SIGINT)
        shown = session.expect(b"\r\n")
        assert session.process.wait(200) == 130
        assert shown.endswith(b"\r\x1b[K\r\n") and b"Traceback" not in shown
        assert processes and not psutil.wait_procs(processes, 100)[1]


def test_piped_lines_are_sent_verbatim(server, talk):
    server.core.on_admit = generates(server.codec, "yes")
    talk('"""', "one\\", is_terminal=False)
    assert prompts(server) == ['<|endoftext|>"""', '<|endoftext|>"""yes\none\\']


def test_answer_cut_at_the_end_of_the_context_is_marked(server, talk):
    server.core.on_admit = generates(server.codec, "yes", "length")
    err = talk("one")[2]
    assert "[cut off because the context is full (" in err and "--max-tokens" not in err


def test_too_long_conversation_continues_without_its_beginning(server, talk, with_template):
    server.core.on_admit = generates(server.codec, "yes")
    first, second = "a " * 600, "b " * 600
    code, _, err = talk(first, second, "c " * 9999, "short")
    assert code == 0 and prompts(server)[1] == format_prompt(second)
    assert "oldest message and its answer were removed: a a a" in err
    assert "your message was removed" in err, "what is too long alone is refused"
    assert prompts(server)[-1].endswith("<user>short\n<a>")


def test_messages_are_removed_until_there_is_room_for_an_answer(server, talk, with_template, tmp_path):
    server.core.on_admit = generates(server.codec, "yes")
    turns = [{"role": role, "content": "x " * 200} for _ in range(4) for role in ("user", "assistant")]
    (tmp_path / "chat.json").write_text(json.dumps(turns))
    _, _, err = talk("y", flags=("--chat", str(tmp_path / "chat.json"), "--max-tokens", "400"))
    left = 4 - err.count("oldest message and its answer were removed: x x")
    (admit,) = [event for event in server.core.received if isinstance(event, Admit)]
    assert prompts(server) == [format_prompt(*["x " * 200] * 2 * left, "y")]
    context = find_model(str(TINY_TARGET)).context_length
    assert 1 <= left < 4 and len(admit.tokens) + 400 <= context and admit.sampling.max_tokens == 400


def test_answer_cut_at_max_tokens_is_marked(server, talk):
    server.core.on_admit = generates(server.codec, "yes", "length")
    tokens = len(server.codec.encode("yes", special=False))
    assert f"[cut off after {tokens} tokens (--max-tokens) | " in talk("x", flags=("-m", str(tokens)))[2]


def test_undo_prints_the_removed_message(server, talk):
    server.core.on_admit = generates(server.codec, "yes")
    assert "Removed with its answer: first " + "word " * 10 in talk("first " + "word " * 50, "/undo")[2]


def test_conversation_can_be_saved_after_the_server_has_stopped(server, talk, with_template, tmp_path):
    def on_admit(admit):
        if len(prompts(server)) == 1:
            return generates(server.codec, "yes")(admit)
        return [RequestBegan(admit.request, "ssd"), Failed(admit.request, "ServerStopped", "the server died")]

    server.core.on_admit = on_admit
    file = tmp_path / "talk.json"
    code, _, err = talk("one", "two", f"/save {file}")
    assert code == 0 and "the server died" in err
    assert [message["content"] for message in json.loads(file.read_text())] == ["one", "yes"]


def test_only_text_goes_to_stdout(server, talk):
    server.core.on_admit = generates(server.codec, "yes")
    _, out, err = talk("one")
    assert out == "yes\n" and "> " in err


def test_interrupt_at_the_prompt_does_not_end_the_chat(server, monkeypatch, capsys):
    lines = iter([KeyboardInterrupt, "x", EOFError])

    def typed():
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    server.core.on_admit = generates(server.codec, "yes")
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", "--connect", server.endpoint]) == 0
    assert "yes\n" in capsys.readouterr().out


def test_piped_messages_before_one_that_is_not_utf8_are_answered(server, monkeypatch, capsys):
    server.core.on_admit = generates(server.codec, "yes")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"x\n\xff\nx\n")))
    assert main(["chat", "--connect", server.endpoint]) == InvalidRequest.exit_code
    captured = capsys.readouterr()
    assert captured.out.count("yes") == 1 and "the text can't be encoded as UTF-8; expected" in captured.err


@pytest.mark.parametrize("is_terminal", [True, False])
def test_invalid_utf8_is_reported_and_ends_only_piped_input(server, monkeypatch, capsys, is_terminal):
    server.core.on_admit = generates(server.codec, "yes")
    lines = iter([b"\xff", b"x"])

    def typed():
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line.decode(errors="surrogateescape")  # as stdin does

    monkeypatch.setattr("sys.stdin", Terminal() if is_terminal else io.StringIO())
    monkeypatch.setattr("builtins.input", typed)
    code = main(["chat", "--connect", server.endpoint])
    captured = capsys.readouterr()
    assert "the text can't be encoded as UTF-8" in captured.err
    assert (code, "yes" in captured.out) == ((0, True) if is_terminal else (InvalidRequest.exit_code, False))


@pytest.mark.parametrize("is_terminal", [True, False])
def test_failed_request_is_reported_and_ends_only_piped_input(server, talk, with_template, is_terminal):
    def on_admit(admit):
        if len(prompts(server)) > 1:
            return generates(server.codec, "yes")(admit)
        return [RequestBegan(admit.request, "ssd"), Failed(admit.request, "WorkerError", "the target was lost")]

    server.core.on_admit = on_admit
    code, out, err = talk("one", "two", is_terminal=is_terminal)
    assert "the target was lost" in err and "your message was removed" in err
    assert (code, "yes" in out) == ((0, True) if is_terminal else (WorkerError.exit_code, False))
    assert prompts(server) == ([format_prompt("one"), format_prompt("two")] if is_terminal else [format_prompt("one")])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/help", "/save FILE"),
        ("/undo", "There is no message to remove."),
        ("/bake", "unknown command '/bake' (see /help)"),
        ("/save", "the file is missing; expected /save FILE"),
        ("half a pair \ud83d", "the text can't be encoded as UTF-8"),
        ("", ""),
    ],
)
def test_slash_commands_send_no_request(server, talk, line, words):
    code, _, err = talk(line)
    assert code == 0 and words in err and not server.core.received


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("/no/such/folder/x", "can't be written"),
        ("a\0b", r"can't be written \(.*embedded null.*\); choose another file"),
        ("~nosuchuser/x", "can't be written"),
    ],
)
def test_conversation_that_cannot_be_saved_prints_one_sentence(server, talk, file, words):
    _, _, err = talk(f"/save {file}", flags=("--system-prompt", "Be brief."))
    assert re.search(words, err) and not server.core.received


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '[{"role": "user"}]', '[["user", "x"]]', '[{"role": 1, "content": "x"}]']
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_invalid_conversation_file_prints_one_sentence(capsys, tmp_path, text, command):
    file = tmp_path / "talk.json"
    file.write_text(text)
    assert main([command, "--chat", str(file)]) == InvalidRequest.exit_code
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1 and "expected a JSON list" in captured.err


def test_generate_continues_a_conversation_and_verify_accepts_it(server, with_template, tmp_path, capsys, monkeypatch):
    server.core.on_admit = generates(server.codec, "yes", "length")
    file, output = tmp_path / "talk.json", tmp_path / "output.json"
    file.write_text(json.dumps([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]))
    length = str(len(server.codec.encode("yes", special=False)))
    flags = ("--connect", server.endpoint, "--system-prompt", "Be brief.", "-m", length)
    assert main(["generate", "--chat", str(file), "-p", "three", "--json", *flags]) == 0
    expected = "<system>Be brief.\n<user>one\n<assistant>two\n<user>three\n<a>"
    assert prompts(server) == [expected]
    output.write_text(capsys.readouterr().out)
    seen = []

    def certify(claim, progress, kernels):
        seen.append(server.codec.decode(claim.tokens))
        return Report(len(claim.generated), len(claim.generated), (), (), 1024)

    monkeypatch.setattr("outrider.orchestrator.cli.verify.certify", certify)
    assert main(["verify", str(output)]) == 0 and seen == [expected]
    assert main(["generate", "--chat", str(file), *flags]) == InvalidRequest.exit_code
    assert "ends with an answer" in capsys.readouterr().err
