"""Model folders that are wrong: the right class is raised through LLM, names what is wrong, and reads no weight.

The details of each file have tests of their own beside their readers; here is the way from there to the user.
"""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import medha.worker.shard
from medha import LLM, errors
from medha.errors import ConfigError, TokenizerError, WeightsError, exit_code
from tests.serving import GREEDY

OPTIONS: dict[str, Any] = {"num_kv_blocks": 4, "block_size": 64}


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


def edit_config(folder: Path, name: str = "config.json", **changes: Any) -> None:
    (folder / name).write_text(json.dumps({**json.loads((folder / name).read_text()), **changes}))


# What is done to the folder, or the options that it is loaded with, and the error with parts of its message.
REFUSED: dict[str, tuple[Callable[[Path], object] | dict[str, Any], type[Exception], list[str]]] = {
    "unknown policy": ({"policy": "larz"}, ConfigError, ["policy='larz'; accepted: edf, fcfs", "; did you mean lars?"]),
    "unknown architecture": (
        partial(edit_config, architectures=["GPT2LMHeadModel"]),
        errors.UnsupportedModelError,
        ["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"],
    ),
    "bad tokenizer": (lambda folder: (folder / "tokenizer.json").write_text("{}"), TokenizerError, ["tokenizer.json"]),
    "tokenizer larger than the embedding": (
        partial(edit_config, vocab_size=255),
        TokenizerError,
        ["ids up to 255", "the embedding has 255 rows"],
    ),
    "truncated": (
        lambda folder: (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-4]),
        WeightsError,
        ["model.safetensors: ", "file not fully covered (the file has "],
    ),
    "missing tensor": (partial(rewrite, change=lambda its: its.pop(NORM)), WeightsError, ["1 tensors missing", NORM]),
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


def test_nan_in_the_weights_loads_and_fails_each_request(folder: Path) -> None:
    rewrite(folder, lambda tensors: tensors[NORM].fill_(torch.nan))
    with LLM(folder, **OPTIONS) as llm:
        outputs = llm.generate(["a", "b"], GREEDY)
    assert [output.outputs[0].finish_reason for output in outputs] == ["error", "error"]
    assert all(isinstance(output.error, errors.NonFiniteLogitsError) for output in outputs)


def test_code_in_the_folder_is_ignored(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit_config(folder, auto_map={"AutoModelForCausalLM": "evil.Model"})
    (folder / "evil.py").write_text("raise SystemExit('imported')")
    with LLM(folder, **OPTIONS) as llm:
        assert llm.generate("a", GREEDY)[0].finished
    assert "auto_map is ignored" in caplog.text
