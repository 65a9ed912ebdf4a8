"""Checkpoints: what is read, and that every malformed one is a WeightsError naming the file (cases A10 to A15)."""

import json
import os
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from medha.config import ModelConfig, RopeConfig
from medha.errors import ConfigError, WeightsError
from medha.models.decoder import build_decoder
from medha.models.weights import (
    EMBEDDING,
    HEAD,
    INDEX_NAME,
    Checkpoint,
    check_tensors,
    expected_tensors,
    load_parameters,
)

FILE = "model.safetensors"
# A vocabulary of 32, hidden 16, inner 24, 2 layers, 4 heads over 2 KV heads of dimension 4, 64 positions.
CONFIG = ModelConfig("LlamaForCausalLM", 32, 16, 24, 2, 4, 2, 4, 64, RopeConfig())


def refused(folder: Path, *parts: str) -> str:
    """A folder is no checkpoint; the message, which holds every part and is short."""
    with pytest.raises(WeightsError) as caught:
        Checkpoint(folder)
    said = str(caught.value)
    assert all(part in said for part in parts) and len(said) < 1500, said
    return said


def random_tensors(config: ModelConfig, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in expected_tensors(config).items()}


def write_index(folder: Path, weight_map: Any) -> None:
    (folder / INDEX_NAME).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


# -- reading ---------------------------------------------------------------------------------------------------


def assert_reads(folder: Path, tensors: dict[str, torch.Tensor], files: dict[str, str]) -> None:
    """A folder holds these tensors and no others, each in its file, and reads each once."""
    with Checkpoint(folder) as checkpoint:
        found = {name: (info.shape, info.file) for name, info in checkpoint.tensors.items()}
        assert found == {name: (tuple(tensor.shape), files[name]) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            torch.testing.assert_close(checkpoint.read(name), tensor, rtol=0, atol=0)  # and of one dtype
        assert checkpoint.bytes_read == sum(t.numel() * t.element_size() for t in tensors.values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_single_file(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = random_tensors(CONFIG, dtype)
    save_file(tensors, tmp_path / FILE)
    assert_reads(tmp_path, tensors, dict.fromkeys(tensors, FILE))


def test_shards_with_and_without_index(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    files = {name: shards[i % 2] for i, name in enumerate(sorted(tensors))}
    for shard in shards:
        save_file({name: tensors[name] for name in tensors if files[name] == shard}, tmp_path / shard)
    assert_reads(tmp_path, tensors, files)
    write_index(tmp_path, files)
    assert_reads(tmp_path, tensors, files)


def test_slices_read_only_their_bytes_and_outlive_the_file_handle(tmp_path: Path) -> None:
    tensor = torch.arange(24.0).view(6, 4)
    save_file({"w": tensor, "scalar": torch.tensor(3.0)}, tmp_path / FILE)
    with Checkpoint(tmp_path) as checkpoint:
        rows = checkpoint.read("w", (slice(2, 4),))
        columns = checkpoint.read("w", (slice(None), slice(1, 3)))
        empty = checkpoint.read("w", (slice(3, 3),))
        assert checkpoint.bytes_read == 8 * 4 + 12 * 4
        scalar = checkpoint.read("scalar", ())
    assert torch.equal(rows, tensor[2:4])
    assert torch.equal(columns, tensor[:, 1:3])
    assert empty.shape == (0, 4)
    assert scalar == 3.0


def test_consolidated_is_skipped(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "model-00001-of-00001.safetensors")
    save_file({"tok_embeddings.weight": torch.zeros(1)}, tmp_path / "consolidated.safetensors")
    assert_reads(tmp_path, {"w": torch.zeros(1)}, {"w": "model-00001-of-00001.safetensors"})


def test_hub_cache_links_out_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "blobs").mkdir()
    (tmp_path / "snapshot").mkdir()
    save_file({"w": torch.ones(2)}, tmp_path / "blobs" / "0123")
    (tmp_path / "snapshot" / "a.safetensors").symlink_to("../blobs/0123")
    write_index(tmp_path / "snapshot", {"w": "a.safetensors"})
    assert_reads(tmp_path / "snapshot", {"w": torch.ones(2)}, {"w": "a.safetensors"})


@pytest.mark.parametrize("when", ["before the first read", "between two reads"])
def test_file_that_shrinks_is_not_mapped(tmp_path: Path, when: str) -> None:
    save_file({"w": torch.zeros(10000)}, tmp_path / FILE)
    with Checkpoint(tmp_path) as checkpoint:
        if when == "between two reads":
            checkpoint.read("w", (slice(0, 1),))
        os.truncate(tmp_path / FILE, 200)
        with pytest.raises(WeightsError, match=f"{FILE}: changed since it was opened"):
            checkpoint.read("w")
        (tmp_path / FILE).unlink()
        with pytest.raises(WeightsError, match=f"{FILE}: "):
            checkpoint.read("w")


# -- headers, which the library checks -------------------------------------------------------------------------


def entry(begin: int, end: int, *, dtype: Any = "F32", shape: Any = None) -> dict[str, Any]:
    shape = [(end - begin) // 4] if shape is None else shape
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


DATA = bytes(16)
TWICE = b'"a":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
HEADERS: dict[str, tuple[bytes | dict[str, Any], bytes, int | None, str]] = {
    "length 2**63 - 1": (b"{}", b"", 2**63 - 1, "header too large"),
    "not JSON": (b"{nope", b"", None, "JSON"),
    "too deep": (b'{"a":' * 200_000, b"", None, "recursion limit"),
    "tensor given twice": (b"{" + TWICE + b"," + TWICE + b"}", DATA, None, "'a' is given twice"),
    "name that steers a terminal": ({"\x1b[2J\n": entry(0, 16)}, DATA, None, "'\\x1b[2J\\n': its name; accepted"),
    "name of a megabyte": ({"a" * 10**6: entry(0, 16)}, DATA, None, "aaa...: its name; accepted: at most 200"),
    "unknown dtype": ({"a": entry(0, 16, dtype="Q4")}, DATA, None, "unknown variant `Q4`"),
    "shape and offsets differ": ({"a": entry(0, 16, shape=[3])}, DATA, None, "invalid shape"),
    "offset past the end": ({"a": entry(0, 32)}, DATA, None, "not fully covered (the file has"),
    "hole": ({"a": entry(0, 4), "b": entry(8, 16)}, DATA, None, "invalid offset for tensor `b`"),
}


@pytest.mark.parametrize("case", HEADERS)
def test_malformed_header(tmp_path: Path, case: str) -> None:
    header, data, length, reason = HEADERS[case]
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (tmp_path / FILE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + data)
    said = refused(tmp_path, reason)
    assert said.startswith(f"{FILE}: ") and len(said) < 1000


@pytest.mark.parametrize(
    "make", [Path.mkdir, lambda path: path.symlink_to("gone"), os.mkfifo, lambda path: path.write_bytes(bytes(7))]
)
def test_not_a_file_of_tensors(tmp_path: Path, make: Any) -> None:
    make(tmp_path / FILE)  # opening a pipe would wait for a writer for ever
    refused(tmp_path, f"{FILE}: ")


# -- folders and the index (A10, A11, A12, A14) ----------------------------------------------------------------


@pytest.mark.parametrize(
    "file", ["../a.safetensors", "a/b.safetensors", "a\0.safetensors", "a.bin", "a" * 300 + ".safetensors", 7], ids=repr
)
def test_hostile_name_in_the_index(tmp_path: Path, file: Any) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / FILE)
    write_index(tmp_path, {"w": file})
    refused(tmp_path, f"{INDEX_NAME}: weight_map['w']={repr(file)[:90]}", "plain name")


@pytest.mark.parametrize(
    ("text", "reason"),
    [("[]", "accepted: a JSON object"), ("{}", "weight_map: None"), ('{"weight_map": {}}', "weight_map: {}")],
)
def test_malformed_index(tmp_path: Path, text: str, reason: str) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / FILE)
    (tmp_path / INDEX_NAME).write_text(text)
    refused(tmp_path, INDEX_NAME, reason)


def test_index_lists_what_is_not_there(tmp_path: Path) -> None:
    save_file({"w": torch.zeros(1)}, tmp_path / "a.safetensors")
    save_file({"v": torch.zeros(1)}, tmp_path / "b.safetensors")
    write_index(tmp_path, {"w": "a.safetensors", "u": "c.safetensors"})
    refused(tmp_path, "lists 1 files that are not there: c.safetensors")
    write_index(tmp_path, {"w": "a.safetensors"} | {f"u{i}": "a.safetensors" for i in range(25)})
    refused(tmp_path, "lists 25 tensors that are not there: 'u0' in a", ", 'u9' in ", ", and 15 more")
    write_index(tmp_path, {"w": "b.safetensors", "v": "a.safetensors"})
    refused(tmp_path, "lists 2 tensors that are not there: 'w' in b.safetensors, 'v' in a")


def test_a_whole_file_beside_an_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"w": torch.zeros(2)}, tmp_path / FILE)
    write_index(tmp_path, {"w": FILE})
    Checkpoint(tmp_path)
    assert not caplog.text
    save_file({"w": torch.ones(2)}, tmp_path / "a.safetensors")
    write_index(tmp_path, {"w": "a.safetensors"})
    assert_reads(tmp_path, {"w": torch.ones(2)}, {"w": "a.safetensors"})
    assert f"{tmp_path}: reads the files that {INDEX_NAME} lists, and not {FILE}" in caplog.text


def test_stale_index(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / FILE)
    write_index(tmp_path, {"w": "a.safetensors", "v": "b.safetensors"})
    assert_reads(tmp_path, {"w": torch.ones(2)}, {"w": FILE})
    assert f"{tmp_path}: reads {FILE}; the files that {INDEX_NAME} lists are not there" in caplog.text
    save_file({"w": torch.zeros(2)}, tmp_path / "a.safetensors")
    refused(tmp_path, "lists 1 files that are not there: b.safetensors")


@pytest.mark.parametrize("file", ["pytorch_model.bin", "model-q4.gguf"])
def test_other_formats_are_refused_unopened(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"cos\nsystem\n(S'exit 1'\ntR.")
    refused(tmp_path, file, str(tmp_path), "never opened", "model.save_pretrained(folder)")


@pytest.mark.parametrize("file", ["\x1b[2J\n.safetensors", "\x1b[2J\n.bin"])
def test_names_of_files_steer_no_terminal(tmp_path: Path, file: str) -> None:
    (tmp_path / file).touch()
    assert refused(tmp_path, "\\x1b[2J\\n").isprintable()


def test_no_weights(tmp_path: Path) -> None:
    refused(tmp_path, "no weights; accepted:")
    refused(tmp_path / "absent", "absent: cannot be listed")


# -- what a model needs (A11) ----------------------------------------------------------------------------------


def test_load_casts_in_place(tmp_path: Path) -> None:
    config = replace(CONFIG, qk_norm=True, head_dim=8)
    tensors = random_tensors(config, torch.bfloat16)
    save_file(tensors, tmp_path / FILE)
    decoder = build_decoder(config, dtype=torch.float32, device=torch.device("cpu"))
    pointers = [parameter.data_ptr() for parameter in decoder.parameters()]
    with Checkpoint(tmp_path) as checkpoint:
        check_tensors(checkpoint, config)
        load_parameters(dict(decoder.named_parameters()), checkpoint)
        assert checkpoint.bytes_read == sum(2 * tensor.numel() for tensor in tensors.values())
    assert [parameter.data_ptr() for parameter in decoder.parameters()] == pointers
    for name, parameter in decoder.named_parameters():
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, tensors[name].float())


def test_one_error_lists_everything(tmp_path: Path) -> None:
    tensors = random_tensors(CONFIG)
    del tensors["model.norm.weight"]
    tensors["extra"] = torch.zeros(1)
    tensors["model.embed_tokens.weight"] = torch.zeros(3, 16)
    tensors["lm_head.weight"] = torch.zeros(32, 16, dtype=torch.int8)
    tensors["model.layers.0.input_layernorm.weight"] = torch.zeros(16, dtype=torch.float64)
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(24, 16).to(torch.float8_e4m3fn)
    save_file(tensors, tmp_path / FILE)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightsError) as caught:
        check_tensors(checkpoint, CONFIG)
    for part in (
        str(tmp_path),
        "1 tensors missing: model.norm.weight",
        f"1 tensors unexpected: extra in {FILE}",
        f"1 tensors of wrong shape: model.embed_tokens.weight in {FILE} is [3, 16], expected [32, 16]",
        "3 tensors of wrong dtype (accepted: F32, BF16, F16): ",
        f"lm_head.weight in {FILE} is I8",
        f"model.layers.0.input_layernorm.weight in {FILE} is F64",
        f"model.layers.1.mlp.up_proj.weight in {FILE} is F8_E4M3",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("tied", [True, False])
def test_what_may_be_there_unread(tmp_path: Path, tied: bool) -> None:
    config = replace(CONFIG, tie_word_embeddings=tied)
    tensors = random_tensors(config)
    more = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(2), HEAD: tensors[EMBEDDING].clone()}
    save_file(tensors | more, tmp_path / FILE)
    with Checkpoint(tmp_path) as checkpoint:
        check_tensors(checkpoint, config)


@pytest.mark.parametrize("row", [0, 1100, 2099, 2100], ids=["first", "second piece", "last", "one more"])
def test_a_tied_head_is_compared_whole(tmp_path: Path, row: int) -> None:
    tensors = random_tensors(config := replace(CONFIG, vocab_size=2100, tie_word_embeddings=True))
    head = torch.cat([tensors[EMBEDDING], torch.zeros(row // 2100, 16)])
    head[row, 3] += 1
    save_file(tensors | {HEAD: head}, tmp_path / FILE)
    with Checkpoint(tmp_path) as checkpoint, pytest.raises(WeightsError, match=r"but lm_head\.weight is another than"):
        check_tensors(checkpoint, config)


@pytest.mark.parametrize("layers", [range(1), range(1, 2)], ids=["first stage", "last stage"])
def test_a_tied_head_alone_is_the_embedding(tmp_path: Path, layers: range) -> None:
    tensors = random_tensors(config := replace(CONFIG, tie_word_embeddings=True))
    save_file({HEAD if name == EMBEDDING else name: tensor for name, tensor in tensors.items()}, tmp_path / FILE)
    decoder = build_decoder(config, dtype=torch.float32, device=torch.device("cpu"), layers=layers)
    with Checkpoint(tmp_path) as checkpoint:
        with pytest.raises(WeightsError, match=f"1 tensors missing: {EMBEDDING}$"):
            check_tensors(checkpoint, CONFIG)
        check_tensors(checkpoint, config)
        load_parameters(parameters := dict(decoder.named_parameters()), checkpoint)
    assert torch.equal(parameters[EMBEDDING], tensors[EMBEDDING])


def test_weights_beyond_memory_are_a_named_error() -> None:
    with pytest.raises(ConfigError, match=r"^the weights held here take \d{14} bytes on cpu, which does not give them"):
        build_decoder(replace(CONFIG, vocab_size=2**40), dtype=torch.bfloat16, device=torch.device("cpu"))
