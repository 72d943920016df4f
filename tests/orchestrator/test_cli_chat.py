"""`outrider chat` before a scripted server: what is asked, what is shown, and what is kept of it."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
from collections import Counter
from dataclasses import replace

import pytest

from outrider.orchestrator.cli import chat, main
from outrider.orchestrator.cli.paint import COLOURS, PLAIN, WORDS
from outrider.orchestrator.events import Admit, Began, Broke, Committed, Ended, Stop, WorkersChanged
from outrider.orchestrator.machine.spawn import child_environment, python
from outrider.orchestrator.pair.chat import render
from outrider.orchestrator.pair.model_files import EMBEDDED_TARGET
from outrider.protocol.certificate import Report
from outrider.protocol.errors import InvalidRequest, WorkerError
from outrider.protocol.messages import Timings
from outrider.protocol.origins import Origin
from tests.orchestrator.stand import says, worker_stats

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)


class Terminal(io.StringIO):
    """A person's lines."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def served(make_stand):
    """A stand whose target says where its model is, as a worker does."""
    stand = make_stand(max_active=1)
    target = replace(worker_stats("target"), model=str(EMBEDDED_TARGET))
    stand.lines.events.put(WorkersChanged((target, worker_stats("draft")), True))
    return stand.start(ready=False)


@pytest.fixture
def talk(served, monkeypatch, capsys):
    """`talk("line", ..., flags=(...))` -> exit code, stdout, stderr."""

    def call(*lines, flags=(), person=True):
        given = "".join(f"{line}\n" for line in lines)
        monkeypatch.setattr("sys.stdin", Terminal(given) if person else io.StringIO(given))
        code = main(["chat", "--connect", served.endpoint, *flags])
        told = capsys.readouterr()
        return code, told.out, told.err

    return call


@pytest.fixture
def templated(monkeypatch):
    monkeypatch.setattr("outrider.orchestrator.pair.model_text.chat_template", lambda folder: TEMPLATE)


def prompts(served):
    return [served.codec.decode(event.tokens) for event in served.core.told if isinstance(event, Admit)]


def as_prompt(*turns):
    roles = ("user", "assistant")
    return render(TEMPLATE, [{"role": roles[i % 2], "content": text} for i, text in enumerate(turns)], {})


def test_every_turn_goes_with_all_that_was_said_before(served, talk, templated):
    served.core.play = says(served.codec, "yes")
    code, out, err = talk("one", "two", "/undo", "three", "/clear", "four", "/quit", "never said")
    assert code == 0 and out.count("yes\n") == 4 and err.count("tok/s") == 4
    expected = [as_prompt("one"), as_prompt("one", "yes", "two"), as_prompt("one", "yes", "three"), as_prompt("four")]
    assert prompts(served) == expected


def test_without_a_template_the_texts_are_one_and_it_is_said_so(served, talk):
    served.core.play = says(served.codec, "    return 1")
    _, _, err = talk("def f(x):", "print(", person=False)
    assert prompts(served) == [f"<|endoftext|>{text}" for text in ("def f(x):", "def f(x):    return 1\nprint(")]
    assert err.startswith("Note: no chat template is used")


def test_the_conversation_is_saved_and_taken_up_again(served, talk, templated, tmp_path):
    served.core.play = says(served.codec, "yes, é")
    file = tmp_path / "talk.json"
    talk("hello", f"/save {file}", flags=("--system-prompt", "Be brief."))
    said = [("system", "Be brief."), ("user", "hello"), ("assistant", "yes, é")]
    assert json.loads(file.read_text()) == [{"role": role, "content": text} for role, text in said]
    code, _, _ = talk("/clear", "again", flags=("--chat", str(file)))
    assert (code, prompts(served)[1]) == (0, "<system>Be brief.\n<user>again\n<a>")
    assert main(["chat", "--connect", served.endpoint, "--chat", str(file), "--system-prompt", "x"]) == 2


def test_tokens_have_the_colours_of_their_origins_and_the_text_is_the_same(served, talk):
    tokens = served.codec.encode("def f(x): return 'é☃'\n", special=False)
    told = tuple(Origin(i % len(Origin)) for i in range(len(tokens)))
    served.core.play = lambda admit: [
        Began(admit.request, "ssd"),
        *(Committed(admit.request, tokens[i : i + 3], origins=told[i : i + 3]) for i in range(0, len(tokens), 3)),
        Ended(admit.request, "length", Timings(predicted_n=len(tokens))),
    ]
    _, out, err = talk("x", flags=("--colors",), person=False)
    assert served.core.told[0].origins
    assert re.sub(r"\x1b\[\d+m", "", out) == "def f(x): return 'é☃'\n\n"
    coloured = {colour: "".join(re.findall(re.escape(colour) + r"(.*?)" + re.escape(PLAIN), out, re.DOTALL))
                for colour in COLOURS.values() if colour}  # fmt: skip
    for origin, colour in COLOURS.items():
        own = [served.codec.decode((t,)) for t, o in zip(tokens, told, strict=True) if o is origin]
        if colour and not any("\ufffd" in text for text in own):
            assert coloured[colour] == "".join(own)
    plain = re.sub(r"\x1b\[\d+m", "", err)
    assert Counter({o: int(n) for o in Origin for n in re.findall(rf"(\d+) {WORDS[o]}", plain)}) == Counter(told)
    assert "Colours: " in err


def test_without_colours_nothing_is_asked_and_nothing_painted(served, talk):
    served.core.play = says(served.codec, "yes")
    _, out, err = talk("x")
    assert not served.core.told[0].origins and "\x1b" not in out + err


def test_an_interrupt_stops_the_answer_and_not_the_program(served, talk, templated, monkeypatch):
    def interrupted(admit):
        if len(prompts(served)) > 1:
            return says(served.codec, "done")(admit)
        return [Began(admit.request, "ssd"), Committed(admit.request, served.codec.encode("half", special=False))]

    class Interrupting(chat.Painter):
        def of(self, chunk):
            print(chunk.text, end="")
            if len(prompts(served)) == 1:
                raise KeyboardInterrupt
            return ""

    served.core.play = interrupted
    monkeypatch.setattr(chat, "Painter", Interrupting)
    code, out, err = talk("one", "two")
    assert code == 0 and "half\n" in out and "done\n" in out and "[stopped]" in err
    assert served.core.wait_for(Stop)[0].reason == "cancelled"
    assert prompts(served)[1] == as_prompt("one", "half", "two")


def test_a_signal_on_a_terminal_stops_the_answer_and_quit_ends(served):
    """The process as a person has it; the target never gets to its end by itself."""
    half = served.codec.encode("half", special=False)
    served.core.play = lambda admit: [Began(admit.request, "ssd"), Committed(admit.request, half)]
    ours, theirs = os.openpty()
    command = python("-c", INTERRUPTIBLE, "chat", "--connect", served.endpoint)
    with subprocess.Popen(command, env=child_environment(), stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        try:
            heard_until(ours, b"> ")
            os.write(ours, b"one\n")
            heard_until(ours, b"half")
            process.send_signal(signal.SIGINT)
            heard_until(ours, b"> ")
            os.write(ours, b"/quit\n")
            assert process.wait(200) == 0
        finally:
            process.kill()
    os.close(ours)
    assert served.core.wait_for(Stop)[0].reason == "cancelled"


# A shell's background jobs begin with interrupts ignored, and so would this one.
INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from outrider.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


def heard_until(terminal: int, words: bytes) -> None:
    heard = b""
    while words not in heard:
        assert select.select([terminal], [], [], 60)[0], f"silence, after {heard!r}"
        more = os.read(terminal, 4096)
        assert more, f"the end, after {heard!r}"
        heard += more


def test_an_interrupt_between_turns_ends_nothing(served, monkeypatch, capsys):
    lines = iter([KeyboardInterrupt, "x", EOFError])

    def typed(_prompt):
        line = next(lines)
        if isinstance(line, str):
            return line
        raise line

    served.core.play = says(served.codec, "yes")
    monkeypatch.setattr("sys.stdin", Terminal())
    monkeypatch.setattr("builtins.input", typed)
    assert main(["chat", "--connect", served.endpoint]) == 0
    assert "yes\n" in capsys.readouterr().out


@pytest.mark.parametrize("person", [True, False])
def test_what_is_no_text_is_a_sentence_and_a_person_goes_on(served, monkeypatch, capsys, person):
    served.core.play = says(served.codec, "yes")
    lines = iter([b"\xff", b"x"])

    def typed(_prompt):
        line = next(lines, None)
        if line is None:
            raise EOFError
        return line.decode()

    monkeypatch.setattr("sys.stdin", Terminal() if person else io.StringIO())
    monkeypatch.setattr("builtins.input", typed)
    code = main(["chat", "--connect", served.endpoint])
    told = capsys.readouterr()
    assert "what was said is not UTF-8" in told.err
    assert (code, "yes" in told.out) == ((0, True) if person else (InvalidRequest.exit_code, False))


@pytest.mark.parametrize("person", [True, False])
def test_a_failure_is_told_and_a_person_goes_on(served, talk, templated, person):
    def play(admit):
        if len(prompts(served)) > 1:
            return says(served.codec, "yes")(admit)
        return [Began(admit.request, "ssd"), Broke(admit.request, "WorkerError", "the target was lost")]

    served.core.play = play
    code, out, err = talk("one", "two", person=person)
    assert "the target was lost" in err and "your turn is taken back" in err
    assert (code, "yes" in out) == ((0, True) if person else (WorkerError.exit_code, False))
    assert prompts(served) == ([as_prompt("one"), as_prompt("two")] if person else [as_prompt("one")])


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/help", "/save FILE"),
        ("/undo", "nothing to take back"),
        ("/bake", "there is no command '/bake'"),
        ("/save", "there is no command '/save'"),
        ("/save /no/such/folder/x", "can't be written"),
        ("", ""),
    ],
)
def test_a_command_asks_the_model_nothing(served, talk, line, words):
    code, _, err = talk(line)
    assert code == 0 and words in err and not served.core.told


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "7", '[{"role": "user"}]', '[["user", "x"]]', '[{"role": 1, "content": "x"}]']
)
@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_file_that_is_no_conversation_is_a_sentence(capsys, tmp_path, text, command):
    file = tmp_path / "talk.json"
    file.write_text(text)
    assert main([command, "--chat", str(file)]) == InvalidRequest.exit_code
    told = capsys.readouterr()
    assert told.out == "" and len(told.err.splitlines()) == 1 and "expected a JSON list" in told.err


def test_generate_takes_a_conversation_and_verify_knows_it(served, templated, tmp_path, capsys, monkeypatch):
    served.core.play = says(served.codec, "yes", "length")
    file, output = tmp_path / "talk.json", tmp_path / "output.json"
    file.write_text(json.dumps([{"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}]))
    length = str(len(served.codec.encode("yes", special=False)))
    flags = ("--connect", served.endpoint, "--system-prompt", "Be brief.", "-m", length)
    assert main(["generate", "--chat", str(file), "-p", "three", "--json", *flags]) == 0
    expected = "<system>Be brief.\n<user>one\n<assistant>two\n<user>three\n<a>"
    assert prompts(served) == [expected]
    output.write_text(capsys.readouterr().out)
    seen = []

    def certify(folder, tokens, generated, sampling, progress, ends):
        seen.append(served.codec.decode(tokens))
        return Report(len(generated), len(generated), (), (), 1024)

    monkeypatch.setattr("outrider.orchestrator.cli.verify.certify", certify)
    assert main(["verify", "--json-file", str(output)]) == 0 and seen == [expected]
    assert main(["generate", "--chat", str(file), *flags]) == InvalidRequest.exit_code
    assert "ends with an answer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (("--preset", "balanced"), (0.7, 0.95, 0.0)),
        (("--preset", "creative"), (1.0, 1.0, 0.05)),
        (("--temp", "0.2", "--preset", "creative"), (0.2, 1.0, 0.05)),
        (("--preset", "greedy"), (0.0, 1.0, 0.0)),
    ],
)
def test_a_preset_is_settings_by_name_and_a_flag_goes_before_it(served, flags, expected):
    served.core.play = says(served.codec, "x")
    assert main(["generate", "-p", "x", "--connect", served.endpoint, *flags]) == 0
    sampling = served.core.told[0].sampling
    assert (sampling.temp, sampling.top_p, sampling.min_p) == expected
