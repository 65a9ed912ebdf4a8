"""Model folders that are wrong: the right class is raised through LLM, names what is wrong, and reads no weight.

The details of each file have tests of their own beside their readers; here is the way from there to the user.
"""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import medha.worker.shard
from medha import LLM
from medha.errors import (
    ConfigError,
    ModelLoadError,
    NonFiniteLogitsError,
    TokenizerError,
    UnsupportedModelError,
    ValidationError,
    WeightsError,
    exit_code,
)
from tests.serving import GREEDY, Model

OPTIONS: dict[str, Any] = {"num_kv_blocks": 4, "block_size": 64}


@pytest.fixture
def folder(bytes_model: Model, tmp_path: Path) -> Path:
    return shutil.copytree(bytes_model.folder, tmp_path / "model")


@pytest.fixture
def _no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*_: object, **__: object) -> None:
        raise AssertionError("a weight was read, or memory taken for one, before the folder was checked")

    for name in ("load_parameters", "build_decoder", "KVCache"):
        monkeypatch.setattr(medha.worker.shard, name, forbidden)


def refused(model: Any, error: type[Exception], *parts: str, **options: Any) -> None:
    """The exact class is raised, its message holds every part and is short, and a command line would exit with 2."""
    with pytest.raises(ConfigError) as caught:
        LLM(model, **{**OPTIONS, **options})
    assert type(caught.value) is error, caught.value
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 1200
    assert exit_code(caught.value) == 2


def edit_json(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, **changes}))


# -- the path --------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("_no_weight_is_read")
def test_hub_id_without_network() -> None:
    refused("nobody/nothing-of-that-name", ModelLoadError, "nobody/nothing-of-that-name", "no such folder here")


@pytest.mark.usefixtures("_no_weight_is_read")
def test_unknown_policy(folder: Path) -> None:
    refused(folder, ConfigError, "policy='larz'; accepted: edf, fcfs", "; did you mean lars?", policy="larz")


# -- files beside the weights; the weights are not even there --------------------------------------------------

Spoil = Callable[[Path], object]


def write(name: str, text: str) -> Spoil:
    return lambda folder: (folder / name).write_text(text)


def config(**changes: Any) -> Spoil:
    return lambda folder: edit_json(folder / "config.json", **changes)


FILES: dict[str, tuple[Spoil, type[Exception], tuple[str, ...]]] = {
    "unknown architecture": (
        config(architectures=["GPT2LMHeadModel"]),
        UnsupportedModelError,
        ("GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"),
    ),
    "corrupt tokenizer.json": (write("tokenizer.json", "{}"), TokenizerError, ("tokenizer.json",)),
    "tokenizer larger than the embedding": (
        config(vocab_size=255),
        TokenizerError,
        ("ids up to 255", "the embedding has 255 rows"),
    ),
}


@pytest.mark.usefixtures("_no_weight_is_read")
@pytest.mark.parametrize("case", FILES)
def test_wrong_file(folder: Path, case: str) -> None:
    spoil, error, parts = FILES[case]
    (folder / "model.safetensors").unlink()
    spoil(folder)
    refused(folder, error, *parts)


# -- weights ---------------------------------------------------------------------------------------------------


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])


NORM = "model.norm.weight"
WEIGHTS: dict[str, tuple[Spoil, tuple[str, ...]]] = {
    "truncated": (truncate, ("model.safetensors: ", "file not fully covered (the file has ")),
    "missing tensor": (lambda f: rewrite(f, lambda t: t.pop(NORM)), ("1 tensors missing", NORM)),
}


@pytest.mark.usefixtures("_no_weight_is_read")
@pytest.mark.parametrize("case", WEIGHTS)
def test_wrong_weights(folder: Path, case: str) -> None:
    spoil, parts = WEIGHTS[case]
    spoil(folder)
    refused(folder, WeightsError, *parts)


@pytest.mark.usefixtures("_no_weight_is_read")
def test_weights_of_another_shape(folder: Path) -> None:
    refused(
        folder, WeightsError, "of wrong shape", "and 11 more", hf_overrides={"intermediate_size": 100, "head_dim": 8}
    )


# -- what is allowed, or shows only when it runs ---------------------------------------------------------------


def test_nan_in_the_weights_loads_and_fails_each_request(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors[NORM].fill_(torch.nan))
    with LLM(folder, **OPTIONS) as llm:
        outputs = llm.generate(["a", "b"], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert all(isinstance(output.error, NonFiniteLogitsError) for output in outputs)


def test_code_in_the_folder_is_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('imported')")
    with LLM(folder, **OPTIONS) as llm:
        assert llm.generate("a", GREEDY)[0].finished
    assert "auto_map is ignored" in caplog.text


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('no system role') }}", "no system role"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "fuel"),
    ],
)
def test_bad_chat_template_fails_chats_alone(folder: Path, template: str, reason: str) -> None:
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    with LLM(folder, **OPTIONS) as llm:
        with pytest.raises(ValidationError, match=reason) as caught:
            llm.chat([{"role": "user", "content": "hi"}])
        assert caught.value.param == "messages"
        assert llm.generate("a", GREEDY)[0].finished
