"""A tiny chat model with scripted answers: each token has one successor.

It has a template with tools and thinking like Qwen's, and a tokenizer of bytes and whole pieces of text. It lets tests
run a whole task with a program, including tool calls, without a capable model.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import mlx.core as mx
import numpy as np
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

END = "<|im_end|>"
PLAIN = ("<|plain|>", "Hello", " there", ", dear", " friend!", END)
ENDLESS = ("<|long|>", "tick ", "tock ", "tack ", "tick ")
THOUGHT = ("<think>", "\nHmm", ", let me", " see.\n", "</think>", "\n\nIt is", " four.", END)
CALL = ("<|tools|>", "I look.", "<tool_call>", '\n{"name": "get_weather",', ' "arguments":', ' {"city": "Paris"}}\n',
        "</tool_call>", END)  # fmt: skip
ANSWER = ("<|answer|>", "Sunny", " in Paris.", END)
BOTH = ("<|both|>", "".join(f'<tool_call>\n{{"name": "get_weather", "arguments": {{"city": "{city}"}}}}\n</tool_call>\n'
                            for city in ("Oslo", "Rome")), END)  # fmt: skip
SCRIPTS = (PLAIN, ENDLESS, THOUGHT, CALL, BOTH, ANSWER)
SIZE = 512
TEMPLATE = """{% if tools %}<|im_start|>system
Tools: {{ tools | tojson }}<|im_end|>
{% endif %}{% for m in messages %}{% if m.role == 'refused' %}{{ raise_exception('no such role') }}{% endif %}
<|im_start|>{{ m.role }}
{{ m.content }}{% for tool_call in m.tool_calls %}<tool_call>{{ tool_call.name or tool_call.function.name }}
{{ tool_call.function.arguments | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if messages[-1].role == 'tool' %}<|answer|>{% elif both %}<|both|>{% elif tools %}<|tools|>
{%- elif enable_thinking %}<think>
{%- elif long %}<|long|>{% else %}<|plain|>{% endif %}{% endif %}"""


Script = tuple[str, ...]
"""The last token of the prompt, and the pieces that follow it, each of which is a token."""


def text_of(script: Script) -> str:
    """Returns the text that a script generates after its first token."""
    return "".join(piece for piece in script[1:] if piece != END)


def write_scripted(path: Path, scripts: tuple[Script, ...] = SCRIPTS, template: str = TEMPLATE) -> Path:
    """Writes the model to `path` in Hugging Face layout. Only end tokens may occur in two scripts."""
    path.mkdir(parents=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = list(dict.fromkeys(["<|im_start|>", *(piece for script in scripts for piece in script)]))
    vocabulary = [*alphabet, *pieces]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.add_tokens([AddedToken(piece, special=_is_special(piece), normalized=False) for piece in pieces])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END, "chat_template": template}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    end = vocabulary.index(END)
    config = {
        "model_type": "llama", "hidden_size": SIZE, "num_hidden_layers": 1, "intermediate_size": 32,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "rms_norm_eps": 1e-6,
        "vocab_size": SIZE, "max_position_embeddings": 1 << 20, "tie_word_embeddings": False, "eos_token_id": end,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    successors = {a: (a + 1) % 94 + 33 for a in range(SIZE)}
    for script in scripts:
        successors.update((vocabulary.index(a), vocabulary.index(b)) for a, b in pairwise(script))
    mx.save_safetensors(str(path / "model.safetensors"), _weights(successors), metadata={"format": "mlx"})
    return path


def _is_special(piece: str) -> bool:
    """Whether a piece is a special token; others are ordinary text, which a grammar may allow."""
    return piece.startswith("<") and piece.endswith(">")


def _weights(successors: dict[int, int]) -> dict[str, mx.array]:
    """Returns one-hot embeddings, a layer with an output near zero, and an output layer that selects the successor.

    Where a grammar forbids the successor, a small bias of closing brackets and quotes makes JSON end soon.
    """
    head = np.tile(_token_bias(), (SIZE, 1)).T.copy()
    for token, after in successors.items():
        head[after, token] = 1.0
    layer = "model.layers.0"
    shapes = {
        f"{layer}.self_attn.q_proj.weight": (32, SIZE),
        f"{layer}.self_attn.k_proj.weight": (16, SIZE),
        f"{layer}.self_attn.v_proj.weight": (16, SIZE),
        f"{layer}.self_attn.o_proj.weight": (SIZE, 32),
        f"{layer}.mlp.gate_proj.weight": (32, SIZE),
        f"{layer}.mlp.up_proj.weight": (32, SIZE),
        f"{layer}.mlp.down_proj.weight": (SIZE, 32),
    }
    draws = np.random.default_rng(0)
    weights = {name: mx.array(draws.standard_normal(shape).astype(np.float32)) for name, shape in shapes.items()}
    for name in (f"{layer}.self_attn.o_proj.weight", f"{layer}.mlp.down_proj.weight"):
        weights[name] = weights[name] * 1e-6
    norms = (f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm", "model.norm")
    return {
        "model.embed_tokens.weight": mx.array(np.eye(SIZE, dtype=np.float32)),
        "lm_head.weight": mx.array(head),
        **{f"{name}.weight": mx.ones(SIZE) for name in norms},
        **weights,
    }


def _token_bias() -> np.ndarray:
    """Returns a small bias for each token: towards closing brackets and quotes, and away from white space."""
    bias = np.zeros(SIZE, np.float32)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    for place, letter in enumerate(('"', "]", "}")):
        bias[alphabet.index(letter)] = 0.01 * (place + 1)
    for blank in "\u0120\u0109\u010a\u010d":  # a space, a tab and line ends, as byte-level tokens write them
        bias[alphabet.index(blank)] = -0.01
    return bias
