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
from medha import LLM, errors
from medha.errors import ConfigError, WeightsError, exit_code
from tests.serving import GREEDY, Model

OPTIONS: dict[str, Any] = {"num_kv_blocks": 4, "block_size": 64}


@pytest.fixture
def folder(bytes_model: Model, tmp_path: Path) -> Path:
    return shutil.copytree(bytes_model.folder, tmp_path / "model")


@pytest.fixture
def _no_weight_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    said = "a weight was read, or memory taken for one, before the folder was checked"
    for name in ("load_parameters", "build_decoder", "KVCache"):
        monkeypatch.setattr(medha.worker.shard, name, lambda *_, **__: pytest.fail(said))


FILE = "model.safetensors"
NORM = "model.norm.weight"


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / FILE)
    change(tensors)
    save_file(tensors, folder / FILE)


# What is done to the folder, or the options that it is loaded with, and the error with parts of its message.
REFUSED: dict[str, tuple[Callable[[Path], object] | dict[str, Any], type[Exception], list[str]]] = {
    "unknown policy": ({"policy": "larz"}, ConfigError, ["policy='larz'; accepted: edf, fcfs", "; did you mean lars?"]),
    "unknown architecture": (
        lambda folder: edit_json(folder / "config.json", architectures=["GPT2LMHeadModel"]),
        errors.UnsupportedModelError,
        ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "corrupt tokenizer.json": (
        lambda folder: (folder / "tokenizer.json").write_text("{}"),
        errors.TokenizerError,
        ["tokenizer.json"],
    ),
    "tokenizer larger than the embedding": (
        lambda folder: edit_json(folder / "config.json", vocab_size=255),
        errors.TokenizerError,
        ["ids up to 255", "the embedding has 255 rows"],
    ),
    "truncated": (
        lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-4]),
        WeightsError,
        ["model.safetensors: ", "file not fully covered (the file has "],
    ),
    "missing tensor": (
        lambda folder: rewrite(folder, lambda tensors: tensors.pop(NORM)),
        WeightsError,
        ["1 tensors missing", NORM],
    ),
    "another shape": (
        {"hf_overrides": {"intermediate_size": 100, "head_dim": 8}},
        WeightsError,
        ["of wrong shape", "and 11 more"],
    ),
    "hub id without network": (
        {"model": "nobody/nothing-of-that-name"},
        errors.ModelLoadError,
        ["nobody/nothing-of-that-name", "no such folder here"],
    ),
}


@pytest.mark.usefixtures("_no_weight_is_read")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_wrong_is_refused_before_a_weight_is_read(folder: Path, case: str) -> None:
    """Of wrong files beside the weights, where there are none. The message is short, and a command line would exit
    with 2."""
    wrong, error, parts = REFUSED[case]
    if callable(wrong):
        wrong(folder)
    if error is not WeightsError:
        (folder / FILE).unlink()
    with pytest.raises(ConfigError) as caught:
        LLM(**{"model": folder, **OPTIONS, **(wrong if isinstance(wrong, dict) else {})})
    assert type(caught.value) is error, caught.value
    for part in parts:
        assert part in str(caught.value)
    assert len(str(caught.value)) < 1200
    assert exit_code(caught.value) == 2


def edit_json(path: Path, **changes: Any) -> None:
    fields = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps({**fields, **changes}))


# -- what is allowed, or shows only when it runs ---------------------------------------------------------------


def test_nan_in_the_weights_loads_and_fails_each_request(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors[NORM].fill_(torch.nan))
    with LLM(folder, **OPTIONS) as llm:
        outputs = llm.generate(["a", "b"], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert all(isinstance(output.error, errors.NonFiniteLogitsError) for output in outputs)


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
        with pytest.raises(errors.ValidationError, match=reason) as caught:
            llm.chat([{"role": "user", "content": "hi"}])
        assert caught.value.param == "messages"
        assert llm.generate("a", GREEDY)[0].finished


def test_a_tied_model_with_a_head_of_its_own(folder: Path) -> None:
    edit_json(folder / "config.json", tie_word_embeddings=True)
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"] + 1}))
    with pytest.raises(WeightsError, match=r"tie_word_embeddings=True, but lm_head\.weight is another"):
        LLM(folder, **OPTIONS)
    rewrite(folder, lambda weights: weights.update({"lm_head.weight": weights["model.embed_tokens.weight"].clone()}))
    LLM(folder, **OPTIONS).close()
