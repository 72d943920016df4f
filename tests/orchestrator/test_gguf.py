"""GGUF files load with their contents; an unreadable one gives one sentence and leaves no files."""

from __future__ import annotations

import errno
import math
import os
import random
import resource
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import mlx.core as mx
import numpy as np
import pytest
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from tokenizers import Tokenizer, normalizers
from tokenizers.pre_tokenizers import ByteLevel

from outrider.engine.loading import load
from outrider.orchestrator.pairing import gguf, gguf_model, pulled
from outrider.orchestrator.pairing.chat_template import TOOL_TEMPLATE, chat_template
from outrider.orchestrator.pairing.gguf import read_gguf
from outrider.orchestrator.pairing.gguf_model import write_model
from outrider.orchestrator.pairing.model_files import find_model
from outrider.orchestrator.pairing.pairing import choose_pair, load_pair
from outrider.orchestrator.pairing.tokenizer import load_codec, read_default_sampling
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol import digest
from outrider.protocol.digest import CACHE_VARIABLE, read_json
from outrider.protocol.errors import ModelError
from tests.gguf_files import SIZES, TEMPLATE, write_gguf

EXACT = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0")
FINER = {"Q2_K": 4, "Q3_K": 5, "Q6_K": 8}
TEXT = [5, 9, 30, 77, 100, 3, 8, 200, 11, 61, 62, 63, 64, 65, 7, 8, 9, 10, 11, 12, 13]
ALPHABET = [*"abc he hell 0123456789 .,'\n\t<|>_-", "é", "中", "👩", "\u0301", "<|im_end|>", "\u2581", "\r\n"]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder))
    return folder


@pytest.fixture
def file(tmp_path) -> Path:
    return write_gguf(tmp_path / "tiny.gguf")


def convert(file: Path, keep_precision: bool = False) -> Path:
    return find_model(str(file), keep_precision=keep_precision).folder


def weights(folder: Path) -> dict[str, mx.array]:
    return mx.load(str(folder / "model.safetensors"))


def random_texts(count: int, seed: int = 0) -> list[str]:
    chance = random.Random(seed)
    letters = [*ALPHABET, *(chr(chance.randrange(0xA1, 0x3000)) for _ in range(40))]
    return ["".join(chance.choices(letters, k=chance.randint(1, 30))) for _ in range(count)]


@pytest.mark.parametrize("kind", EXACT)
def test_simple_quantized_blocks_keep_their_exact_values(tmp_path, kind):
    file = write_gguf(tmp_path / "a.gguf", "qwen2", kind)
    found, header = weights(convert(file)), read_gguf(file)
    for old, new in (("blk.1.ffn_down", "model.layers.1.mlp.down_proj"), ("token_embd", "model.embed_tokens")):
        parts = [found[f"{new}.{part}"] for part in ("weight", "scales", "biases")]
        bits = gguf.mlx_bits(kind, False)
        ours = mx.dequantize(parts[0], *(part.astype(mx.float32) for part in parts[1:]), group_size=32, bits=bits)
        assert (
            np.array(ours) == dequantize(header.read_tensor_bytes(f"{old}.weight"), GGMLQuantizationType[kind])
        ).all()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_simple_quantized_blocks_equal_those_loaded_by_mlx(tmp_path, kind):
    file = write_gguf(tmp_path / "a.gguf", "qwen2", kind)
    theirs, ours = mx.load(str(file)), weights(convert(file))
    for part in ("weight", "scales", "biases"):
        assert mx.array_equal(ours[f"model.layers.0.mlp.up_proj.{part}"], theirs[f"blk.0.ffn_up.{part}"])


@pytest.mark.parametrize(("kind", "bits"), [("Q4_K", 4), ("Q5_K", 5)])
def test_k_quant_blocks_keep_their_levels(tmp_path, kind, bits):
    """The scales of their groups are rounded to half precision."""
    header = read_gguf(write_gguf(tmp_path / "a.gguf", "qwen2", kind))
    matrix = gguf.convert_tensor(header, "blk.0.ffn_up.weight", bits, "float16")
    theirs = dequantize(header.read_tensor_bytes("blk.0.ffn_up.weight"), GGMLQuantizationType[kind])
    parts = [mx.array(matrix[part].astype(np.float32)) for part in ("scales", "biases")]
    ours = np.array(mx.dequantize(mx.array(matrix["weight"]), *parts, group_size=32, bits=bits))
    steps = np.repeat(np.abs(matrix["scales"].astype(np.float32)), 32, axis=-1)
    assert (np.abs(ours - theirs) <= 0.03 * steps + 2**-11 * np.abs(theirs).max()).all()


@pytest.mark.parametrize(("kind", "bits"), FINER.items())
def test_other_blocks_are_requantized_or_kept_in_half_precision(tmp_path, kind, bits):
    file = write_gguf(tmp_path / "a.gguf", "qwen2", kind)
    theirs = dequantize(read_gguf(file).read_tensor_bytes("blk.0.ffn_up.weight"), GGMLQuantizationType[kind])
    requantized, kept = weights(convert(file)), weights(convert(file, keep_precision=True))
    name = "model.layers.0.mlp.up_proj"
    parts = [requantized[f"{name}.{part}"].astype(mx.float32) for part in ("scales", "biases")]
    ours = np.array(mx.dequantize(requantized[f"{name}.weight"], *parts, group_size=32, bits=bits))
    groups = theirs.reshape(len(theirs), -1, 32)
    step = np.repeat((groups.max(-1) - groups.min(-1)) / (2**bits - 1), 32, axis=-1)
    assert (np.abs(ours - theirs) <= 0.51 * step + 2**-10 * np.abs(theirs).max()).all()
    assert kept[f"{name}.weight"].dtype == mx.float16
    assert (np.array(kept[f"{name}.weight"]) == theirs.astype(np.float16)).all()


@pytest.mark.parametrize(("kind", "dtype"), [("F32", mx.float32), ("F16", mx.float16), ("BF16", mx.bfloat16)])
def test_unquantized_tensors_keep_their_dtype(tmp_path, kind, dtype):
    found = weights(convert(write_gguf(tmp_path / "a.gguf", "gemma3", kind)))
    assert {value.dtype for value in found.values()} == {dtype}


def test_llama_q_and_k_rows_are_unpermuted(tmp_path):
    """llama.cpp's converter permutes these rows."""
    rows = np.arange(64 * 64, dtype=np.float32).reshape(64, 64)
    permuted = rows.reshape(4, 2, 8, 64).swapaxes(1, 2).reshape(64, 64)
    file = write_gguf(tmp_path / "a.gguf", tensors={"blk.0.attn_q.weight": permuted})
    assert (np.array(weights(convert(file))["model.layers.0.self_attn.q_proj.weight"]) == rows).all()


def test_llama_attention_biases_are_unpermuted(tmp_path):
    file = write_gguf(tmp_path / "a.gguf", biased=True)
    found = weights(convert(file))
    pairs = (
        np.frombuffer(read_gguf(file).read_tensor_bytes("blk.0.attn_q.bias"), np.float32)
        .reshape(4, 8, 2)
        .swapaxes(1, 2)
    )
    assert (np.array(found["model.layers.0.self_attn.q_proj.bias"]) == pairs.reshape(-1)).all()
    assert load(str(convert(file))).config["attention_bias"]


def test_weights_of_several_files_are_all_loaded(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "a.gguf")
    whole = load(str(convert(file))).model(mx.array([TEXT]))
    monkeypatch.setattr(gguf_model, "MAX_SHARD_BYTES", 20_000)
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "other"))
    folder = convert(file)
    assert len(list(folder.glob("model*.safetensors"))) > 3
    assert mx.array_equal(load(str(folder)).model(mx.array([TEXT])), whole)


@pytest.mark.parametrize("architecture", [one for one in SIZES if one != "gemma2"])
def test_every_architecture_loads_with_an_untied_head(tmp_path, architecture):
    file = write_gguf(tmp_path / "a.gguf", architecture, "Q8_0", tied=False)
    logits = load(str(convert(file))).model(mx.array([TEXT]))
    assert logits.shape == (1, len(TEXT), 265) and np.isfinite(np.array(logits)).all()


@pytest.mark.parametrize("kind", ["F32", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize(
    "architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3", "phi3"]
)  # those that transformers reads
def test_logits_match_transformers(tmp_path, architecture, kind):
    """Compares with an independent reader, if torch and accelerate are installed (CONTRIBUTING.md)."""
    torch = pytest.importorskip("torch", reason="transformers reads GGUF files with torch")
    pytest.importorskip("accelerate", reason="transformers reads GGUF files with accelerate")
    from transformers import AutoModelForCausalLM

    file = write_gguf(tmp_path / "a.gguf", architecture, kind, tied=architecture != "llama")
    ours = np.array(load(str(convert(file, keep_precision=True))).model(mx.array([TEXT])))[0]
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path), gguf_file=file.name, dtype=torch.float32)
    with torch.no_grad():
        theirs = model(torch.tensor([TEXT])).logits[0].numpy()
    near = 2e-2 if kind.endswith("_K") else 1e-4  # K-quants' scales are rounded
    assert np.abs(ours - theirs).max() <= near * np.abs(theirs).max()


@pytest.mark.parametrize("kind", ["F32", "Q4_K"])
@pytest.mark.parametrize("architecture", [one for one in SIZES if one != "mistral"])
def test_greedy_text_matches_llama_cpp_up_to_near_ties(tmp_path, architecture, kind):
    """Compares with llama.cpp, if it is installed (CONTRIBUTING.md). With K-quants it rounds activations, too."""
    xllamacpp = pytest.importorskip("xllamacpp", reason="xllamacpp, which has llama.cpp inside, is not installed")
    file = write_gguf(tmp_path / "a.gguf", architecture, kind, tied=architecture not in ("phi3", "olmo2", "olmo3"))
    params = xllamacpp.CommonParams()
    params.model.path, params.n_ctx, params.n_parallel, params.warmup, params.verbosity = str(file), 256, 1, False, 0
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1  # its threads spin while they wait for each other
    wanted = {"prompt": TEXT, "n_predict": 32, "temperature": 0, "return_tokens": True, "ignore_eos": True}
    server = xllamacpp.Server(params)  # it ends when its last reference is deleted
    with httpx.Client(timeout=200) as client:
        tokens = client.post(f"{server.listening_address}/completion", json=wanted).json()["tokens"]
    del server
    logits = np.array(load(str(convert(file))).model(mx.array([TEXT + tokens])))[0][len(TEXT) - 1 : -1]
    logits[:, [0, 2]] = -np.inf  # end tokens, which `ignore_eos` forbids
    behind = [float(row.max() - row[token]) for row, token in zip(logits, tokens, strict=True)]
    assert len(tokens) == 32 and max(behind) <= (0.02 if kind == "F32" else 0.05) * logits.max()
    assert sum(margin > 0 for margin in behind) <= 4


def test_llama3_rope_scaling_is_recovered_from_its_factors(tmp_path):
    from mlx_lm.models.rope_utils import Llama3RoPE

    scaling = {
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    rope = Llama3RoPE(16, base=500000.0, scaling_config=scaling)
    factors = np.array(rope._freqs) / 500000.0 ** (np.arange(0, 16, 2) / 16)
    tensors, metadata = {"rope_freqs.weight": factors.astype(np.float32)}, {"llama.rope.freq_base": 500000.0}
    config = read_config(convert(write_gguf(tmp_path / "a.gguf", tensors=tensors, metadata=metadata)))
    assert config["rope_scaling"] == {"type": "llama3", "rope_type": "llama3", **scaling}
    with pytest.raises(ModelError, match="scales positions unlike Llama 3"):
        convert(write_gguf(tmp_path / "b.gguf", tensors={"rope_freqs.weight": factors.astype(np.float32) + 1}))


@pytest.mark.parametrize(
    ("metadata", "factor"),
    [
        ({"scaling.type": "linear", "scaling.factor": 4.0}, 4.0),
        ({"scaling.factor": 4.0}, 4.0),
        ({"scale_linear": 4.0}, 4.0),
        ({"scaling.type": "none", "scaling.factor": 4.0}, None),
        ({"scaling.type": "linear", "scaling.factor": 0.0}, None),
        ({"scaling.type": "yarn"}, None),
    ],
)
def test_linear_scaling_is_read_under_every_name_as_in_llama_cpp(tmp_path, metadata, factor):
    prefixed = {f"llama.rope.{key}": value for key, value in metadata.items()}
    config = read_config(convert(write_gguf(tmp_path / "a.gguf", metadata=prefixed)))
    assert config.get("rope_scaling", {}).get("factor") == factor


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_factor_of_attention_that_mlx_lacks_is_refused(tmp_path, kind):
    scaling = {"type": kind, "factor": 4.0, "original_context_length": 32, "attn_factor": 1.0}
    for factor in (1.0, 1 + 0.1 * math.log(4), 1.5):
        metadata = {f"llama.rope.scaling.{key}": value for key, value in {**scaling, "attn_factor": factor}.items()}
        file = write_gguf(tmp_path / f"{factor}.gguf", metadata=metadata)
        if factor == 1.0 or (kind == "yarn" and factor < 1.5):  # YaRN's own, as in OLMo 3's files
            assert read_config(convert(file))["rope_scaling"]["factor"] == 4.0
        else:
            with pytest.raises(ModelError, match=r"scales attention \(llama.rope.scaling.attn_factor\)"):
                convert(file)


def test_scaling_of_long_contexts_is_read(tmp_path):
    """YaRN, and Phi's factors for each frequency, which extend the context beyond that of the training."""
    metadata = {"scaling.type": "yarn", "scaling.factor": 4.0, "scaling.original_context_length": 64}
    config = read_config(
        convert(
            write_gguf(tmp_path / "a.gguf", metadata={f"llama.rope.{key}": value for key, value in metadata.items()})
        )
    )
    scaling = {"type": "yarn", "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert config["rope_scaling"] == scaling
    factors = {"long": np.linspace(1.05, 4, 8, dtype=np.float32), "short": np.ones(8, np.float32)}
    tensors = {f"rope_factors_{length}.weight": values for length, values in factors.items()}
    metadata = {"phi3.rope.scaling.original_context_length": 64, "phi3.rope.dimension_count": 16}
    folder = convert(write_gguf(tmp_path / "b.gguf", "phi3", tied=False, tensors=tensors, metadata=metadata))
    scaling = read_config(folder)["rope_scaling"]
    assert (scaling["rope_type"], scaling["original_max_position_embeddings"]) == ("longrope", 64)
    assert np.allclose(scaling["short_factor"], factors["short"])
    rope = load(str(folder)).model.layers[0].self_attn.rope
    assert np.allclose(np.array(rope._freqs), factors["long"] * 10000.0 ** (np.arange(0, 16, 2) / 16))


def read_config(folder: Path) -> dict:
    return read_json(folder / "config.json")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe", "qwen2", "tekken", "gpt-4o"])
def test_text_round_trips_through_tokens(tmp_path, pre):
    folder = convert(write_gguf(tmp_path / "a.gguf", pre=pre))
    tokenizer, composed = Tokenizer.from_file(str(folder / "tokenizer.json")), normalizers.NFC().normalize_str
    for text in random_texts(2000):
        decoded = tokenizer.decode(tokenizer.encode(text, add_special_tokens=False).ids, skip_special_tokens=False)
        assert decoded == text or (pre == "qwen2" and composed(decoded) == composed(text))  # as Qwen 2's tokenizer does


def test_pre_tokenizer_splits_limit_merges(tmp_path):
    def pieces(pre: str, text: str) -> list[str]:
        folder = convert(write_gguf(tmp_path / f"{pre}.gguf", pre=pre))
        return Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).tokens

    assert pieces("smollm", "12") == ["1", "2"] and pieces("llama-bpe", "12") == ["12"]
    assert pieces("smollm", "<|im_end|>a") == ["<|im_end|>", "a"]
    assert pieces("smollm", "hell a") == ["hel", "l", "Ġa"]


def test_sentencepiece_tokenizer_keeps_bytes_and_spaces(tmp_path):
    spelled = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "\u2581",
        "h",
        "e",
        "he",
        "\u2581he",
    ]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": spelled,
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 5],
        "tokenizer.ggml.scores": [0.0] * 259 + [-9.0, -9.0, -9.0, -1.0, -2.0],
        "tokenizer.ggml.add_bos_token": True,
    }
    file = write_gguf(tmp_path / "a.gguf", metadata=metadata)
    codec = load_codec(find_model(str(file)))
    assert [codec.tokenizer.id_to_token(token) for token in codec.encode("he e\n")] == [
        "<s>", "\u2581he", "\u2581", "e", "<0x0A>",
    ]  # fmt: skip
    for text in random_texts(500):
        if text.lstrip() == text and "\u2581" not in text:
            assert codec.tokenizer.decode(list(codec.encode(text, special=False)), skip_special_tokens=False) == text


@pytest.mark.parametrize(("architecture", "kept"), [("phi3", []), ("llama", ["\u2581", "<0x0A>"])])
def test_special_tokens_of_phi_3_take_in_the_spaces_after_them(tmp_path, architecture, kept):
    """As in Phi 3's tokenizer.json. llama.cpp recognises the model by its name."""
    special = ["<unk>", "<s>", "</s>", "<|user|>", "<|end|>"]
    spelled = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "h"]
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": spelled,
        "tokenizer.ggml.token_type": [2, 3, 3, 3, 3, *[6] * 256, 1, 1],
        "tokenizer.ggml.scores": [0.0] * 261 + [-1.0, -2.0],
    }
    codec = load_codec(find_model(str(write_gguf(tmp_path / "a.gguf", architecture, metadata=metadata))))
    found = [codec.tokenizer.id_to_token(token) for token in codec.encode("<|user|>\n<s>h<|end|>\n", special=False)]
    assert found == ["<|user|>", *kept, "<s>", "\u2581", "h", "<|end|>", *kept]


def test_token_types_may_be_fractions_or_no_numbers(tmp_path):
    types = [3.0] * 3 + [math.nan] * 262
    codecs = [
        load_codec(find_model(str(write_gguf(tmp_path / f"{name}.gguf", metadata=metadata))))
        for name, metadata in (("usual", {}), ("odd", {"tokenizer.ggml.token_type": types}))
    ]
    assert codecs[0].tokenizer.to_str() == codecs[1].tokenizer.to_str() and codecs[0].eos == codecs[1].eos


def test_any_token_can_begin_a_text(tmp_path):
    """Even one with a colon, which separates a token from its type in templates of the tokenizers library."""
    colon = 3 + sorted(ByteLevel.alphabet()).index(":")
    metadata = {"tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.bos_token_id": colon}
    codec = load_codec(find_model(str(write_gguf(tmp_path / "a.gguf", metadata=metadata))))
    assert codec.encode("a") == (colon, *codec.encode("a", special=False)) and len(codec.encode("a")) == 2


def test_end_token_of_the_chat_format_ends_the_text(file):
    codec = load_codec(find_model(str(file)), template=True)
    assert codec.eos == {0, 2} and codec.special["eos_token"] == "<|im_end|>"
    assert codec.decode(codec.encode_prompt("a")) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_end_of_turn_token_of_the_metadata_ends_the_text(tmp_path):
    """Whatever the text of the token is."""
    file = write_gguf(tmp_path / "a.gguf", metadata={"tokenizer.ggml.eot_token_id": 9})
    assert 9 in load_codec(find_model(str(file))).eos


@pytest.mark.parametrize("kind", [3, 4, 1])
def test_end_token_of_the_chat_format_is_never_text_whatever_its_type(tmp_path, kind):
    """If the token is not special, converters give it another type, and the metadata may name another end token."""
    metadata = {"tokenizer.ggml.token_type": [3, 3, kind, *[1] * 262], "tokenizer.ggml.eos_token_id": 0}
    codec = load_codec(find_model(str(write_gguf(tmp_path / "a.gguf", metadata=metadata))))
    assert 2 in codec.eos and codec.encode("a<|im_end|>", special=False)[-1] == 2


def test_absent_token_may_be_the_largest_number(tmp_path):
    """Some converters write -1, which is 2**32 - 1 in these unsigned fields. llama.cpp ignores it as well."""
    absent = {f"tokenizer.ggml.{name}_token_id": 2**32 - 1 for name in ("bos", "padding")}
    special = load_codec(find_model(str(write_gguf(tmp_path / "a.gguf", metadata=absent)))).special
    assert special == {"eos_token": "<|im_end|>", "unk_token": "<|endoftext|>"}


def test_template_for_conversations_with_tools_is_kept(tmp_path):
    """llama.cpp's converter writes templates other than the default one under their names."""
    file = write_gguf(tmp_path / "a.gguf", metadata={"tokenizer.chat_template.tool_use": "{{ tools }}"})
    assert chat_template(convert(file)) == TEMPLATE
    assert chat_template(convert(file), TOOL_TEMPLATE) == "{{ tools }}"


def test_two_gguf_files_form_a_pair(file, tmp_path):
    draft = write_gguf(tmp_path / "draft.gguf", kind="Q4_0")
    pair = choose_pair(ServeSettings(model=str(file), draft_model=str(draft)))
    assert pair.target.name == str(file) and pair.draft is not None and pair.draft.name == str(draft)
    assert load_pair(pair).template is not None


def test_same_content_is_converted_once(file, tmp_path, monkeypatch):
    made: list[Path] = []
    real = gguf_model.write_model
    monkeypatch.setattr(gguf_model, "write_model", lambda *given: (made.append(given[1]), real(*given)))
    copy = tmp_path / "ollama" / "sha256-0123"
    copy.parent.mkdir()
    copy.write_bytes(file.read_bytes())
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(convert, [file, copy, file, copy]))
    assert len(folders) == 1 and len(made) == 1
    assert convert(file, keep_precision=True) not in folders


def test_threads_hashing_one_file_agree(file, cache, monkeypatch):
    all_hashed = threading.Barrier(4)

    def hash_together(path: Path) -> str:
        all_hashed.wait(30)
        return "0123"

    monkeypatch.setattr(digest, "file_hash", hash_together)
    for number in range(20):
        os.utime(file, ns=(number, number))
        with ThreadPoolExecutor(4) as pool:
            assert set(pool.map(digest.content_hash, [file] * 4)) == {"0123"}
    assert len(list((cache / "hashes").iterdir())) == 20


def test_empty_hash_file_is_written_again(file, cache):
    """As after a power failure."""
    known = digest.content_hash(file)
    (hash_file,) = (cache / "hashes").iterdir()
    hash_file.write_text("")
    assert digest.content_hash(file) == known == hash_file.read_text()


def test_sampling_of_the_file_comes_before_that_of_a_known_model(tmp_path, monkeypatch):
    file = write_gguf(tmp_path / "a.gguf", metadata={
        "general.sampling.temp": 0.6, "general.sampling.top_k": 20, "general.sampling.penalty_repeat": 1.05
    })  # fmt: skip
    known = replace(pulled.PULLED_MODELS["smollm2"], sha256=digest.content_hash(file))
    monkeypatch.setitem(pulled.PULLED_MODELS, "smollm2", known)
    own = {"temp": 0.6, "top_k": 20, "repetition_penalty": 1.05}
    assert read_default_sampling(convert(file)) == {**own, "top_p": known.sampling["top_p"]}


def test_unfinished_conversion_is_redone(file, cache):
    folder = convert(file)
    (folder / "model.safetensors").unlink()
    folder.rename(folder.with_name(f".{folder.name}.unfinished"))
    assert (convert(file) / "model.safetensors").is_file()
    assert not list(cache.rglob("*.unfinished"))


def test_conversion_that_was_not_used_for_long_is_removed(file, tmp_path):
    old, later = convert(file), [write_gguf(tmp_path / f"{kind}.gguf", kind=kind) for kind in ("Q4_1", "Q8_0")]
    assert convert(later[0]).is_dir() and old.is_dir()
    os.utime(old, (0, 0))
    digest._in_use.clear()  # as if the processes that used it had ended
    assert convert(later[1]).is_dir() and not old.exists()
    assert convert(file) == old and old.is_dir()


def test_full_disk_is_reported_and_leaves_no_model(file, cache, monkeypatch):
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(ModelError, match=r"can't be stored in .*: No space left on device; .*OUTRIDER_CACHE"):
        convert(file)
    assert not list((cache / "gguf").glob("*"))[1:] and not list(cache.rglob("*.json"))


def test_disk_that_is_full_from_the_first_file_on_is_reported(file, cache):
    """No file may grow beyond 4 KiB, so the tokenizer's file, which is written first, does not fit."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ModelError, match=r"can't be stored in .*: File too large; .*OUTRIDER_CACHE"):
            convert(file)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_unreadable_file_is_not_reported_as_a_full_disk(file, cache, monkeypatch):
    def broken(*_: object, **__: object) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(np, "fromfile", broken)
    with pytest.raises(ModelError, match=r"can't be read: Input/output error"):
        convert(file)


def test_unwritable_cache_is_reported(file, tmp_path, monkeypatch):
    (tmp_path / "plain").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "plain" / "below"))
    with pytest.raises(ModelError, match="can't be stored in"):
        convert(file)


def test_truncated_file_is_reported_at_any_length(file, tmp_path, cache):
    whole = file.read_bytes()
    cut = tmp_path / "cut.gguf"
    for end in [*range(4, 9000, 211), len(whole) - 1]:
        cut.write_bytes(whole[:end])
        with pytest.raises(ModelError, match=r"is truncated|is too small"):
            write_model(read_gguf(cut), tmp_path / "never")
    with pytest.raises(ModelError, match="truncated"):
        convert(cut)
    assert not list(cache.rglob("*.safetensors"))


@pytest.mark.parametrize("seed", range(60))
def test_corrupt_header_raises_only_model_error(file, tmp_path, seed):
    chance, broken = random.Random(seed), bytearray(file.read_bytes())
    for _ in range(3):
        broken[chance.randrange(4, 9000)] = chance.randrange(256)
    other = tmp_path / "broken.gguf"
    other.write_bytes(broken)
    folder = tmp_path / "out"
    folder.mkdir()
    try:
        write_model(read_gguf(other), folder)
    except ModelError as error:
        assert len(str(error).splitlines()) == 1


def test_non_gguf_files_are_refused(tmp_path):
    other = tmp_path / "other.gguf"
    other.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        find_model(str(other))
    other.write_bytes(b"GGUF" + struct.pack("<I", 1))
    with pytest.raises(ModelError, match="is GGUF version 1; expected"):
        find_model(str(other))
    other.write_bytes(b"")
    with pytest.raises(ModelError, match="is not a GGUF file"):
        find_model(str(other))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metadata": {"llama.block_count": "two"}}, "llama.block_count is 'two'; expected a whole number"),
        ({"metadata": {"llama.rope.freq_base": [1.0, 2.0]}}, "freq_base is [1.0, 2.0]; expected a number"),
        ({"metadata": {"tokenizer.ggml.tokens": "none"}}, "tokens is 'none'; expected a list of texts"),
        ({"metadata": {"tokenizer.ggml.add_bos_token": 1}}, "add_bos_token is 1; expected true or false"),
        ({"metadata": {"tokenizer.ggml.token_type": [1, 1]}}, "tokenizer.ggml.token_type has 2 numbers; expected"),
        ({"without": "llama.embedding_length"}, "has no llama.embedding_length in its metadata"),
        ({"without": "blk.1.ffn_up.weight"}, "has no tensor blk.1.ffn_up.weight, which llama models have"),
        ({"tensors": {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}}, "has the tensor blk.0.attn_sinks.weight"),
        ({"tensors": {"blk.0.\x1b[2J.weight": np.ones(4, np.float32)}}, r"has the tensor blk.0.\x1b[2J.weight"),
        ({"tensors": {"blk.0.attn_q.weight": np.ones((2, 32, 64), np.float32)}}, "has 3 dimensions; expected 1 or 2"),
        (
            {"architecture": "qwen3moe", "tensors": {"blk.0.ffn_up_exps.weight": np.ones((1, 4, 128, 64), np.float32)}},
            "has 4 dimensions; expected 1, 2 or 3",
        ),
        ({"metadata": {"llama.expert_count": 8}}, "is a mixture of experts"),
        ({"metadata": {"split.count": 3}}, "is one of several parts"),
        ({"metadata": {"general.type": "adapter"}}, "is of the type 'adapter'; expected the file of a whole model"),
        ({"metadata": {"llama.rope.scaling.type": "su", "llama.rope.scaling.factor": 2.0}}, "positions with 'su'"),
        ({"metadata": {"tokenizer.ggml.model": "bert"}}, "a tokenizer of the kind 'bert'; expected gpt2 or llama"),
        ({"pre": "of-next-year"}, "has the pre-tokenizer 'of-next-year'"),
        ({"metadata": {"tokenizer.ggml.eos_token_id": 999}}, "but its eos_token is 999"),
        ({"metadata": {"tokenizer.ggml.merges": ["q q"]}}, "the merge 'q q', which does not make a token"),
        ({"metadata": {"llama.attention.head_count": 0}}, "head_count is 0; expected a whole number above 0"),
        ({"architecture": "phi3", "metadata": {"phi3.attention.key_length": 0}}, "key_length is 0; expected a whole"),
        ({"metadata": {"llama.embedding_length": 32}}, "has embeddings of 64 numbers, but an embedding_length of 32"),
        ({"tensors": {"token_embd.weight": np.ones(64, np.float32)}}, "has embeddings of no numbers"),
    ],
)  # fmt: skip
def test_inconsistent_file_error_names_the_fault(tmp_path, changes, words):
    file = write_gguf(tmp_path / "a.gguf", **changes)
    with pytest.raises(ModelError) as refused:
        convert(file)
    assert words in str(refused.value) and str(file) in str(refused.value)


def test_part_that_names_no_architecture_is_recognized(tmp_path):
    file = write_gguf(tmp_path / "a-00002-of-00003.gguf", metadata={"split.count": 3})
    file.write_bytes(file.read_bytes().replace(b"general.architecture", b"general.architectur_", 1))
    with pytest.raises(ModelError, match="is one of several parts"):
        find_model(str(file))


def test_unknown_architectures_and_types_are_named(tmp_path):
    file = write_gguf(tmp_path / "a.gguf")
    renamed = file.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
    (tmp_path / "b.gguf").write_bytes(renamed)
    with pytest.raises(ModelError, match="has the architecture 'mamba'; expected one of llama, mistral, smollm3"):
        find_model(str(tmp_path / "b.gguf"))
    at = file.read_bytes().index(b"token_embd.weight") + len(b"token_embd.weight") + 4 + 16
    whole = bytearray(file.read_bytes())
    whole[at] = 99
    (tmp_path / "c.gguf").write_bytes(whole)
    with pytest.raises(ModelError, match=r"the tensor token_embd.weight has the unknown type 99"):
        find_model(str(tmp_path / "c.gguf"))
