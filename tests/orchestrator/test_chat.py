"""The model's own chat template formats a prompt."""

from __future__ import annotations

import json

import pytest

from outrider.orchestrator.pairing.chat_template import TOOL_TEMPLATE, chat_template, render_template
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import load_codec
from outrider.protocol.errors import ModelError

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role not in ['user'] %}{{ raise_exception('only users') }}{% endif %}
<{{ message['role'] }}>{{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"""


def write_config(folder, **fields):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_prompt_equals_transformers_chat_template(model_folder):
    from transformers import AutoTokenizer

    write_config(model_folder, chat_template=TEMPLATE)
    codec, transformers_tokenizer = (
        load_codec(find_model(str(model_folder)), True),
        AutoTokenizer.from_pretrained(str(model_folder)),
    )
    messages = [{"role": "user", "content": " hi <there> "}]
    text = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert render_template(TEMPLATE, [{"role": "user", "content": " hi <there> "}], codec.special) == text
    expected = transformers_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert codec.encode_prompt(" hi <there> ") == tuple(expected)


def test_format_that_is_code_of_mlx_lm_is_refused_unless_there_is_a_template(model_folder):
    """DeepSeek V3.2 is such a model. Its conversations must not be formatted as plain text."""
    write_config(model_folder, chat_template_type="deepseek_v32")
    with pytest.raises(ModelError, match=r"only code of mlx-lm \(deepseek_v32\); add chat_template.jinja"):
        chat_template(model_folder)
    (model_folder / "chat_template.jinja").write_text(TEMPLATE)
    assert chat_template(model_folder) == TEMPLATE and chat_template(model_folder, TOOL_TEMPLATE) is None


def test_generation_tags_are_ignored_as_by_transformers(model_folder):
    from transformers import AutoTokenizer

    template = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}|{% endfor %}"
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    transformers_tokenizer = AutoTokenizer.from_pretrained(str(model_folder))
    text = transformers_tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False)
    assert render_template(template, messages, {}) == text == "hi|ho|"


@pytest.mark.parametrize("field", ["reasoning_content", "thinking"])
def test_past_thinking_reaches_templates_under_both_names(field):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho", field: "hm"}]
    template = "{% for m in messages %}{{ m.reasoning_content or '' }}{{ m.thinking or '' }}{{ m.content }}{% endfor %}"
    assert render_template(template, messages, {}) == "hihmhmho"


@pytest.mark.parametrize("answer", ["", "ho"])
def test_channels_of_an_earlier_answer_do_not_reach_the_template(answer):
    """The template of gpt-oss refuses them, so a chat would fail at its second turn."""
    final = f"<|end|><|start|>assistant<|channel|>final<|message|>{answer}" if answer else ""
    messages = [
        {"role": "assistant", "content": f"<|channel|>analysis<|message|>hm{final}"},
        {"role": "user", "content": "<|channel|>?"},
    ]
    template = "{% for m in messages %}{{ m.content }}|{% endfor %}"
    assert render_template(template, messages, {}) == f"{answer}|<|channel|>?|"


def test_chat_template_is_none_without_a_template(model_folder):
    assert chat_template(model_folder) is None


def test_jinja_file_takes_precedence_over_config(model_folder):
    write_config(model_folder, chat_template="from config")
    assert chat_template(model_folder) == "from config"
    (model_folder / "chat_template.jinja").write_text("from file")
    assert chat_template(model_folder) == "from file"


def test_unreadable_jinja_file_is_a_model_error(model_folder):
    (model_folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"chat_template.jinja can't be read as text"):
        chat_template(model_folder)


@pytest.mark.parametrize("saved", [False, True], ids=["in the config", "in files"])
def test_named_templates_are_found_where_transformers_looks(model_folder, tmp_path, saved):
    from transformers import AutoTokenizer

    named = [{"name": "tool_use", "template": "with tools"}, {"name": "default", "template": "plain"}]
    write_config(model_folder, chat_template=named if saved else [*named, {"name": ["not text"]}])
    if saved:
        AutoTokenizer.from_pretrained(str(model_folder)).save_pretrained(str(tmp_path / "saved"))
        model_folder = tmp_path / "saved"
    assert [chat_template(model_folder), chat_template(model_folder, TOOL_TEMPLATE)] == ["plain", "with tools"]
    assert chat_template(model_folder, "rag") is None


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('no') }}",
        "{% if %}",
        "{{ messages.append(1) }}",
        "{% macro never() %}{{ never() }}{% endmacro %}{{ never() }}",
        "{{ 'x' * 10**15 }}",
    ],
)
def test_failing_or_unsafe_template_raises_model_error(template):
    with pytest.raises(ModelError, match=r"chat template failed \(.+\)"):
        render_template(template, [{"role": "user", "content": "hi"}], {})
