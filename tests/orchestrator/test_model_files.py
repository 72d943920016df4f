"""How a model's files and pairs are found, and the errors if they are missing or invalid."""

from __future__ import annotations

import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from outrider.orchestrator.pairing import pairing
from outrider.orchestrator.pairing.model_files import (
    TINY_DRAFT,
    TINY_TARGET,
    ModelFiles,
    find_model,
    find_own_head,
    is_gguf,
    tiny_heads,
    tiny_pair,
)
from outrider.orchestrator.pairing.pairing import choose_pair, load_pair
from outrider.orchestrator.settings import ServeSettings
from outrider.protocol.errors import InvalidRequest, ModelError
from outrider.protocol.heads import context_length, head_kind
from outrider.protocol.values import set_field


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def test_a_folder_is_read_without_its_weights():
    found = find_model(str(TINY_TARGET))
    assert (found.model_type, found.vocab_size, found.context_length) == ("llama", 4096, 1024)


def test_sizes_are_read_from_text_config(model_folder):
    (model_folder / "config.json").write_text(
        json.dumps({"model_type": "gemma3", "text_config": {"vocab_size": 9, "max_position_embeddings": 8}})
    )
    found = find_model(str(model_folder))
    assert (found.vocab_size, found.context_length) == (9, 8)


_YARN = {"factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "yarn", **_YARN}}, 131072),
        ({"max_position_embeddings": 40960, "rope_parameters": {"rope_type": "yarn", **_YARN}}, 131072),
        ({"max_position_embeddings": 262144, "rope_scaling": {"type": "yarn", **_YARN}}, 262144),
        ({"max_position_embeddings": 40960, "rope_scaling": {"type": "yarn", "factor": "4"}}, 40960),
        ({"max_position_embeddings": 40960, "rope_scaling": {"type": "linear", **_YARN}}, 40960),
        ({"max_position_embeddings": 2**40}, 2**31 - 1),
        ({"max_position_embeddings": "4096"}, 32768),
    ],
)
def test_context_length_is_what_the_positions_allow(config, expected):
    """Qwen's models are extended by adding only a `rope_scaling` to config.json."""
    assert context_length(config) == context_length({"text_config": config}) == expected


@pytest.mark.parametrize("name", ["/no/such/path", "./nope", "~/nope-nope", "nope", "a/b/c", "org/na me"])
def test_missing_path_raises_model_error(name):
    with pytest.raises(ModelError, match=r"no such path: .*expected a name \(smollm2 or .*a folder or a GGUF file"):
        find_model(name)


def test_an_adapter_is_to_be_merged_first(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapters.safetensors").write_bytes(b"")
    with pytest.raises(ModelError, match=r"config.json is missing \(merge an adapter into its model first"):
        find_model(str(tmp_path))


def test_missing_path_in_the_environment_names_the_variable(monkeypatch):
    monkeypatch.setenv("OUTRIDER_MODEL", "/no/such/path")
    with pytest.raises(ModelError, match=r"no such path: /no/such/path \(in OUTRIDER_MODEL\); expected"):
        find_model("/no/such/path")


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 300, "/proc/1/fd/x"])
def test_path_that_cannot_be_looked_up_raises_model_error(name, monkeypatch):
    def forbidden(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    if name.startswith("/proc"):
        monkeypatch.setattr(Path, "exists", forbidden)
    is_long_and_only_missing = sys.version_info >= (3, 14) and name.startswith("xxx")  # there, Path.exists is False
    why = "no such path: " if is_long_and_only_missing else r"can't be opened \("
    with pytest.raises(ModelError, match=rf"{why}.*expected a name \("):
        find_model(name)


@pytest.mark.skipif(sys.platform == "darwin", reason="macOS has no such names")
@pytest.mark.parametrize("link", ["", "to it", "from it"])
def test_path_that_is_not_utf8_raises_model_error(model_folder, link):
    """The libraries for weights and tokenizers can't open such a path, and messages can't contain it."""
    odd = model_folder.with_name(os.fsdecode(b"mod\xe8le"))
    if link == "from it":
        odd.symlink_to(model_folder)
    else:
        model_folder.rename(odd)
        model_folder.symlink_to(odd)
    with pytest.raises(ModelError, match=r"can't be opened \(.*surrogates not allowed\); expected") as caught:
        find_model(str(model_folder if link == "to it" else odd))
    assert str(caught.value).encode()


def test_folder_that_may_not_be_entered_raises_model_error(model_folder, monkeypatch):
    def forbidden(self):
        if self.parent == model_folder:
            raise PermissionError(13, "Permission denied")
        return True

    for name in ("exists", "is_file"):  # as up to Python 3.13
        monkeypatch.setattr(Path, name, forbidden)
    with pytest.raises(ModelError, match=r"can't be opened \(Permission denied\)"):
        find_model(str(model_folder))


def test_uncached_model_error_says_why_it_was_not_fetched():
    with pytest.raises(ModelError, match="no model org/name: there is no such folder, and offline mode is on"):
        find_model("org/name")


class LinkError(Exception):
    """Any error of the HTTP library of the installed huggingface_hub, such as httpx's ReadError."""


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (LinkError("cut"), r"there is no such folder, and Hugging Face can't be reached \(LinkError: cut\)"),
        (ConnectionResetError(104, "reset"), r"Hugging Face can't be reached \(ConnectionResetError: .*reset\)"),
        (ImportError("Using SOCKS proxy, but"), r"be reached \(ImportError: Using SOCKS proxy, but\)"),
        (OSError(28, "No space left on device"), r"the download can't be stored \(No space left on device\).*HF_HOME"),
        (PermissionError(13, "Permission denied"), r"the download can't be stored \(Permission denied\)"),
        (HFValidationError("Cannot have .. in repo_id"), "is not the id of a Hugging Face repository"),
    ],
)
def test_failed_download_names_its_cause(monkeypatch, error, reason):
    def failing(name, allow_patterns, local_files_only=False):
        raise LocalEntryNotFoundError("not cached") if local_files_only else error

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.snapshot_download", failing)
    with pytest.raises(ModelError, match=f"^no model org/name: .*{reason}"):
        find_model("org/name")


def write_cached_repository(cache: Path, name: str, *files: str) -> None:
    """Writes a repository as huggingface_hub caches it, of which only these files have been downloaded."""
    snapshot = cache / f"models--org--{name}" / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (snapshot.parent.parent / "refs").mkdir()
    (snapshot.parent.parent / "refs" / "main").write_text("0")
    places = {"a": "model-1.safetensors", "b": "model-2.safetensors"}
    for file in files:
        (snapshot / file).write_text(json.dumps({"weight_map": places}))


def test_partly_cached_model_is_not_treated_as_complete(tmp_path, monkeypatch):
    """Its download was interrupted, or only the tokenizer was needed so far, and Hugging Face can't be reached now."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    shards, index = ("model-1.safetensors", "model-2.safetensors"), "model.safetensors.index.json"
    write_cached_repository(tmp_path, "described", "config.json")
    write_cached_repository(tmp_path, "half", "config.json", index, shards[0])
    write_cached_repository(tmp_path, "whole", "config.json", index, *shards)
    write_cached_repository(tmp_path, "single", "config.json", "model.safetensors")
    assert [find_model(f"org/{name}").folder.name for name in ("whole", "single")] == ["0", "0"]
    for name in ("described", "half"):
        assert find_model(f"org/{name}", weights=False).folder.name == "0"
        with pytest.raises(ModelError, match=f"^no model org/{name}: .* the cache has no complete copy"):
            find_model(f"org/{name}")


@pytest.mark.parametrize("index", [[], {"weight_map": []}, {"weight_map": "x"}, {"weight_map": None}])
def test_index_of_another_form_is_named(tmp_path, monkeypatch, index):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    write_cached_repository(tmp_path, "odd", "config.json", "model.safetensors.index.json")
    (file,) = tmp_path.rglob("*.index.json")
    file.write_text(json.dumps(index))
    for find in (find_model, find_own_head):
        with pytest.raises(ModelError, match=rf"^{file} (holds list; expected|has a weight_map)"):
            find("org/odd")


def test_pipe_in_place_of_a_model_is_not_waited_for(tmp_path):
    os.mkfifo(pipe := tmp_path / "pipe")
    descriptor = os.open(pipe, os.O_RDWR)
    os.write(descriptor, b"GGUF")  # otherwise the test would block, too
    assert not is_gguf(pipe)
    os.close(descriptor)
    with pytest.raises(ModelError, match="pipe is a file that is not in GGUF format; expected"):
        find_model(str(pipe))


def test_unreadable_gguf_file_is_reported(tmp_path, monkeypatch):
    file = tmp_path / "a.gguf"
    file.write_bytes(b"GGUF")

    def forbidden(self, *_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", forbidden)
    with pytest.raises(ModelError, match=r"a\.gguf can't be read: Permission denied"):
        find_model(str(file))


def test_invalid_model_folders_raise_model_error(tmp_path, model_folder):
    with pytest.raises(ModelError, match=r"is not a model folder: config.json is missing"):
        find_model(str(tmp_path))
    with pytest.raises(ModelError, match="is a file"):
        find_model(str(model_folder / "config.json"))
    with pytest.raises(ModelError, match="name is empty"):
        find_model("")
    for text in ("not json", 100_000 * "["):
        (model_folder / "config.json").write_text(text)
        with pytest.raises(ModelError, match="can't be read as JSON"):
            find_model(str(model_folder))


@pytest.mark.parametrize("file", ["model.safetensors", "tokenizer.json"])
def test_clone_without_git_lfs_names_the_file_and_the_remedy(model_folder, file):
    (model_folder / file).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    with pytest.raises(ModelError, match=rf"has a pointer of Git LFS in place of {file}; run `git lfs pull`"):
        find_model(str(model_folder))


def test_clone_with_pointers_for_unused_files_is_found(model_folder):
    for name in ("pytorch_model.bin", "consolidated.safetensors"):
        (model_folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n")
    assert find_model(str(model_folder)).folder == model_folder.resolve()
    (model_folder / "pytorch_model.bin").rename(model_folder / "model.safetensors")
    assert find_model(str(model_folder), weights=False).folder == model_folder.resolve()


def test_weights_are_required_only_when_needed(model_folder):
    (model_folder / "model.safetensors").rename(model_folder / "._model.safetensors")  # as macOS leaves beside a copy
    assert find_model(str(model_folder), weights=False).folder == model_folder.resolve()
    with pytest.raises(ModelError, match=r"has no \*\.safetensors files; other weights \(pytorch_model\.bin\) have to"):
        find_model(str(model_folder))


# --- pairs --------------------------------------------------------------------------------------------------------


def test_tiny_pair_is_chosen_without_a_model():
    pair = choose_pair(ServeSettings())
    assert tiny_pair() == (str(TINY_TARGET), str(TINY_DRAFT))
    assert (pair.settings.model, pair.settings.draft_model) == tiny_pair()
    assert pair.settings.has_draft_worker and pair.notes == ()


@pytest.mark.parametrize("kind", tiny_heads())
def test_head_kind_without_a_model_uses_the_tiny_target(kind):
    alone = choose_pair(ServeSettings(draft_backend=kind))
    assert alone.settings.model == str(TINY_TARGET) and alone.settings.draft_model == tiny_heads()[kind]
    assert choose_pair(ServeSettings(head=(kind,))).settings.head == (tiny_heads()[kind],)


@pytest.mark.parametrize(
    ("architectures", "kind"),
    [(["LlamaForCausalLMEagle3"], "eagle3"), ("DFlashDraftModel", "dflash"), (["LlamaForCausalLM"], None), (1, None)],
)
def test_head_is_recognized_by_its_architecture_however_that_is_written(architectures, kind):
    """mlx-lm also accepts a text instead of a list. Other values must not raise an error."""
    assert head_kind({"architectures": architectures}) == kind


def test_head_kind_without_a_tiny_head_is_refused():
    with pytest.raises(ModelError, match="no redrafter head comes with tiny; expected --draft-model"):
        choose_pair(ServeSettings(draft_backend="redrafter"))


def test_early_exit_of_the_tiny_target_needs_no_head():
    assert choose_pair(ServeSettings(draft_backend="early-exit")).settings.draft_model == str(TINY_TARGET)
    assert choose_pair(ServeSettings(head=("early-exit",))).settings.head == ("early-exit",)


def test_target_without_draft_model_uses_ngrams_with_a_note(model_folder):
    pair = choose_pair(ServeSettings(model=str(model_folder)))
    assert pair.draft is None and pair.settings.draft_backend == "ngram"
    assert "no draft model (--draft-model)" in pair.notes[0]


def test_named_drafter_without_a_draft_model_is_not_replaced_by_ngrams(model_folder):
    for backend in ("coreml", "new"):
        settings = ServeSettings(model=str(model_folder), draft_backend="coreml")
        set_field(settings, "draft_backend", backend)
        with pytest.raises(ModelError, match=r"no draft model comes with .*; expected --draft-model$"):
            choose_pair(settings)


def test_speculation_without_draft_model_and_ngrams_asks_for_a_draft_model(model_folder):
    with pytest.raises(InvalidRequest, match="mode ssd needs a drafter; expected a draft model, a draft_backend that"):
        choose_pair(ServeSettings(model=str(model_folder), mode="ssd", ngrams=False))


def test_backends_without_a_draft_model_choose_none():
    for backend in ("ngram", "none"):
        pair = choose_pair(ServeSettings(draft_backend=backend))
        assert pair.draft is None and pair.settings.draft_model is None


EAGLE3 = [{"architectures": ["LlamaForCausalLMEagle3"]}, {"speculators_model_type": "eagle3"}]


BLOCKS = [
    *({"architectures": [name]} for name in ("DFlashDraftModel", "DFlash2DraftModel", "Qwen3DSparkModel")),
    {"speculators_model_type": "dspark", "architectures": ["DSparkSpeculator"]},
]
HEADS = [
    *((config, "eagle3") for config in (*EAGLE3, {"architectures": ["PEagleDraftModel"]})),
    *((config, "dflash") for config in BLOCKS),
    ({"model_type": "recurrent_drafting_drafter"}, "redrafter"),
    ({"model_type": "early_exit_adapter"}, "early-exit"),
]


@pytest.mark.parametrize(("config", "kind"), HEADS)
def test_auto_backend_detects_heads_by_their_config(tmp_path, config, kind):
    """A head has no tokenizer: its tokens are the target's, and so is its context."""
    (tmp_path / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    head = ServeSettings(model=str(TINY_TARGET), draft_model=str(tmp_path), draft_backend="auto")
    pair = choose_pair(head)
    assert pair.settings.draft_backend == kind and pair.settings.colocate
    assert pair.draft is not None and pair.draft.context_length == pair.target.context_length
    assert load_pair(pair).model is pair.target
    model = ServeSettings(model=str(TINY_TARGET), draft_model=str(TINY_DRAFT), draft_backend="auto")
    assert choose_pair(model).settings.draft_backend == "mlx"
    with pytest.raises(ModelError, match=f"is a draft head; expected --draft-backend {kind} or auto"):
        choose_pair(replace(head, draft_backend="mlx"))


@pytest.mark.parametrize("named", ["mtp.fc.weight", "model.layers.6.eh_proj.weight"])
def test_only_the_shards_of_the_head_are_fetched(tmp_path, monkeypatch, named):
    asked = []
    places = {"model.layers.0.norm.weight": "model-1.safetensors", named: "model-2.safetensors"}

    def fetched(name, allow_patterns, local_files_only=False):
        if local_files_only:
            raise ValueError("nothing here yet")
        asked.append([pattern for pattern in allow_patterns if "safetensors" in pattern])
        (tmp_path / "config.json").write_text('{"num_hidden_layers": 6}')
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
        (tmp_path / "model-2.safetensors").write_bytes(b"")
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fetched)
    assert find_own_head("org/name").folder == tmp_path.resolve()
    assert asked == [[], ["model-2.safetensors"]]
    del places[named]
    assert find_own_head("org/name").folder == tmp_path.resolve() and asked[2:] == [[]]


def test_own_head_is_found_in_the_model_or_one_of_the_same_sizes(tmp_path, model_folder):
    """A smaller model of the family may contain a head as well, but is used as a draft model."""
    config = json.loads((model_folder / "config.json").read_text())
    (model_folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))
    own = choose_pair(ServeSettings(model=str(model_folder), draft_backend="mtp"))
    assert own.settings.draft_model == own.settings.model and own.settings.colocate
    named = {"model": str(model_folder), "draft_model": str(model_folder)}
    assert choose_pair(ServeSettings(**named, draft_backend="auto")).settings.draft_backend == "mtp"
    assert choose_pair(ServeSettings(**named)).settings.draft_backend == "mlx"
    smaller = {**config, "mtp_num_hidden_layers": 1, "hidden_size": 64}
    (model_folder / "config.json").write_text(json.dumps(smaller))
    early = choose_pair(ServeSettings(model=str(model_folder), draft_backend="early-exit")).settings
    assert early.draft_model == early.model and early.colocate
    beside = ServeSettings(model=str(TINY_TARGET), draft_model=str(model_folder), draft_backend="auto")
    assert choose_pair(beside).settings.draft_backend == "mlx"


@pytest.mark.parametrize("colocate", [False, True])
def test_draft_with_a_different_vocabulary_is_refused(model_folder, colocate):
    tokenizer = json.loads((model_folder / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    first, second = [word for word, i in vocabulary.items() if i in (300, 301)]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    (model_folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ModelError, match="2 tokens, such as"):
        load_pair(choose_pair(ServeSettings(model=str(TINY_TARGET), draft_model=str(model_folder), colocate=colocate)))


def test_a_draft_with_the_targets_tokenizer_files_has_its_vocabulary(model_folder, monkeypatch):
    """Loading a tokenizer takes half of a start, so theirs is loaded once."""
    both = choose_pair(ServeSettings(model=str(TINY_TARGET), draft_model=str(model_folder)))
    loaded, load = list[ModelFiles](), pairing.load_codec
    monkeypatch.setattr(pairing, "load_codec", lambda model, template: loaded.append(model) or load(model, template))
    assert load_pair(both).model is both.target
    assert loaded == [both.target]
