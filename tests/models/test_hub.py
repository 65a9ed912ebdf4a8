"""Resolving a model: local folders, hub ids, and everything that is neither (case A1)."""

import os
from pathlib import Path
from unittest.mock import Mock

import huggingface_hub
import pytest
from huggingface_hub.utils import filter_repo_objects

from medha import LLM
from medha.errors import ModelLoadError
from medha.models.folder import ALLOW_PATTERNS, IGNORE_PATTERNS, resolve_model
from tests.serving import Model


@pytest.fixture(autouse=True)
def _no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *args, **_: pytest.fail(f"asked for {args}"))


def test_local_folder_is_used_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "org" / "name").mkdir(parents=True)
    assert resolve_model(str(tmp_path)) == tmp_path
    monkeypatch.chdir(tmp_path)
    assert resolve_model("org/name") == Path("org/name")
    (tmp_path / "link").symlink_to(tmp_path / "org")
    assert resolve_model(str(tmp_path / "link")) == tmp_path / "link"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert resolve_model("~/org") == tmp_path / "org"


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        ("{tmp}/file", "is a file"),
        ("{tmp}/dangling", "dangling symlink"),
        ("", "accepted: a folder"),
        ("./org/name", "no such folder"),
        ("org/name/more", "not a hub id"),
        ("org/\0name", "model 'org/"),
        ("a" * 5000, "model 'aaa"),
        ("~nobody-here/model", "model '~nobody-here/model' cannot be read"),
    ],
)
def test_wrong_path_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str, reason: str) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "dangling").symlink_to(tmp_path / "gone")
    monkeypatch.chdir(tmp_path)
    model = model.replace("{tmp}", str(tmp_path))
    with pytest.raises(ModelLoadError) as caught:
        resolve_model(model)
    assert reason in str(caught.value)
    assert repr(model)[:100] in str(caught.value)
    assert "hub id such as org/name" in str(caught.value)


def test_unreadable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    denied = PermissionError(13, "Permission denied", str(tmp_path))
    monkeypatch.setattr(os, "scandir", Mock(side_effect=denied))  # a chmod would not stop root
    with pytest.raises(ModelLoadError, match=r"cannot be read.*Permission denied"):
        resolve_model(str(tmp_path))


def test_hub_id_is_fetched_without_pickles(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download := Mock(return_value=str(tmp_path)))
    assert resolve_model("org/name-1.5", revision="v2") == tmp_path
    patterns = {"allow_patterns": list(ALLOW_PATTERNS), "ignore_patterns": list(IGNORE_PATTERNS)}
    download.assert_called_once_with("org/name-1.5", revision="v2", **patterns)


def test_patterns() -> None:
    wanted = ["model-00001-of-00002.safetensors", "tokenizer.json", "merges.txt", "additional_chat_templates/t.jinja"]
    others = ["consolidated.safetensors", "pytorch_model.bin", "modeling_custom.py", "original/model.safetensors"]
    patterns = {"allow_patterns": ALLOW_PATTERNS, "ignore_patterns": IGNORE_PATTERNS}
    assert list(filter_repo_objects([*wanted, *others], **patterns)) == wanted


def test_hub_failure_is_converted(monkeypatch: pytest.MonkeyPatch) -> None:
    failure = KeyError("etag")  # whatever class the hub raises
    monkeypatch.setattr(huggingface_hub, "snapshot_download", Mock(side_effect=failure))
    with pytest.raises(ModelLoadError, match=r"'org/name' at revision 'v2': .*KeyError.*accepted") as caught:
        resolve_model("org/name", revision="v2")
    assert caught.value.__cause__ is failure


@pytest.mark.parametrize("options", [{"tokenizer": "org/name"}, {"model": "org/name", "load_format": "dummy"}])
def test_weights_that_nobody_reads_are_not_fetched(
    options: dict[str, str], bytes_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download := Mock(return_value=str(bytes_model.folder)))
    LLM(**{"model": bytes_model.folder, "num_kv_blocks": 2} | options).close()
    assert "*.safetensors" not in download.call_args.kwargs["allow_patterns"]
