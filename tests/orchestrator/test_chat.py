"""The model's own chat template formats a prompt."""

from __future__ import annotations

import json

import pytest

from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.tokenizer import ModelText, chat_template, load_codec, render
from outrider.protocol.errors import ModelError

TEMPLATE = """{{ bos_token }}{% for message in messages %}
{% if message.role not in ['user'] %}{{ raise_exception('only users') }}{% endif %}
<{{ message['role'] }}>{{ message['content'] | trim }}
{% endfor %}
{% if add_generation_prompt %}<assistant>{% endif %}{% if tools %}{{ tools | tojson }}{% endif %}"""


def write_config(folder, **fields):
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_the_prompt_is_what_transformers_makes(model_folder):
    from transformers import AutoTokenizer

    write_config(model_folder, chat_template=TEMPLATE)
    codec, theirs = load_codec(find_model(str(model_folder))), AutoTokenizer.from_pretrained(str(model_folder))
    messages = [{"role": "user", "content": " hi <there> "}]
    text = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert render(TEMPLATE, [{"role": "user", "content": " hi <there> "}], codec.special) == text
    expected = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    assert ModelText(codec, chat_template(model_folder)).tokens(" hi <there> ") == tuple(expected)


def test_no_template_no_chat(model_folder):
    assert chat_template(model_folder) is None


def test_the_jinja_file_goes_before_the_config(model_folder):
    write_config(model_folder, chat_template="from config")
    assert chat_template(model_folder) == "from config"
    (model_folder / "chat_template.jinja").write_text("from file")
    assert chat_template(model_folder) == "from file"


def test_of_several_templates_the_default_is_taken(model_folder):
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    write_config(model_folder, chat_template=named)
    assert chat_template(model_folder) == "yes"


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}", "{{ messages.append(1) }}"])
def test_a_template_that_fails_or_reaches_out_is_a_sentence(template):
    with pytest.raises(ModelError, match="chat template failed"):
        render(template, [{"role": "user", "content": "hi"}], {})
