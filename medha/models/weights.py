"""Read the tensors of a safetensors checkpoint: one file, or shards with an index.

Every header is parsed and checked here before the library maps the file, because the library loads a key given twice
without a word, names no file in its errors, and would end the process with SIGBUS on a file that shrinks. Pickled
weights are never opened. Format: the safetensors README (an 8-byte little-endian length, JSON, then the data).
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from medha.config import ModelConfig
from medha.errors import ConfigError, WeightsError
from medha.models.hf_config import parse_json_object, read_json_object, short_repr

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LOADABLE_DTYPES = ("F32", "BF16", "F16")

_MAX_JSON_BYTES = 100_000_000
_MAX_ENTRIES = 10**6
_MAX_DIMS = 64
_MAX_LISTED = 10
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")
# fmt: off
_BITS = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}
# fmt: on


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where one tensor of a checkpoint lies.

    Attributes:
        dtype: as safetensors writes it, for example ``BF16``.
        file: name of its file in the folder.
        offset: of its first byte within the data of that file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    num_bytes: int
    offset: int


class Checkpoint:
    """The safetensors files of one model folder, headers checked, data mapped when first read.

    Attributes:
        folder: where the files are.
        bytes_read: bytes of the tensors and slices read so far.
    """

    def __init__(self, folder: Path) -> None:
        """Check the index and every header; no data is read.

        Raises:
            WeightsError: no safetensors, or something wrong with the index or a file.
        """
        self.folder = folder
        self.bytes_read = 0
        self._infos: dict[str, TensorInfo] = {}
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._open: dict[str, Any] = {}  # safe_open handles, which safetensors leaves untyped
        files, weight_map = _find_files(folder)
        for file in files:
            infos, self._stamps[file] = read_header(folder / file)
            for info in infos:
                if info.name in self._infos:
                    raise WeightsError(f"{file}: tensor {info.name!r} is also in {self._infos[info.name].file}")
                self._infos[info.name] = info
        lost = [name for name, file in weight_map.items() if name not in self or self._infos[name].file != file]
        if lost:
            places = [f"{name!r} in {weight_map[name]}" for name in lost]
            raise WeightsError(f"{INDEX_NAME}: lists {len(lost)} tensors that are not there: {_listing(places)}")

    @property
    def names(self) -> list[str]:
        """Names of all tensors, in the order of files and offsets."""
        return list(self._infos)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def info(self, name: str) -> TensorInfo:
        """Where a tensor lies, its dtype and shape.

        Raises:
            WeightsError: no such tensor.
        """
        if name not in self._infos:
            raise WeightsError(f"{self.folder}: no tensor {name!r} among {len(self._infos)}")
        return self._infos[name]

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or a slice of it; only the pages of that slice are read from the file.

        Args:
            name: of the tensor.
            index: one slice for each leading dimension, without steps; None for the whole.

        Returns:
            On the CPU, in the dtype of the file. It may be mapped from the file, so copy it before changing it.

        Raises:
            WeightsError: no such tensor, a slice that does not fit, or the file changed or cannot be read.
        """
        info = self.info(name)
        if index is not None:
            _check_index(info, index)
        handle = self._handle(info.file)
        try:
            tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError, ValueError, TypeError) as error:
            raise WeightsError(f"{info.file}: tensor {name!r} cannot be read: {error}") from error
        assert isinstance(tensor, torch.Tensor), "safetensors returned no tensor"
        self.bytes_read += tensor.numel() * tensor.element_size()
        return tensor

    def close(self) -> None:
        """Let go of the mapped files; tensors already read stay valid."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _handle(self, file: str) -> Any:
        path = self.folder / file
        try:
            if _stamp(os.stat(path)) != self._stamps[file]:
                raise WeightsError(f"{file}: changed since it was opened; accepted: a file that nobody is writing")
            if file not in self._open:
                self._open[file] = safe_open(path, framework="pt")
        except (SafetensorError, OSError, RuntimeError) as error:
            raise WeightsError(f"{file}: {error}") from error
        return self._open[file]


# ---------------------------------------------------------------------------------------------------------------------
# Files and headers


def _find_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files to open, and the index's map from tensor to file (empty without an index)."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        raise WeightsError(f"{folder}: cannot be listed: {error.strerror}") from error
    if INDEX_NAME in entries:
        weight_map = _read_weight_map(folder / INDEX_NAME)
        files = sorted(set(weight_map.values()))
        absent = [file for file in files if file not in entries]
        if absent:
            raise WeightsError(f"{INDEX_NAME}: lists {len(absent)} files that are not there: {_listing(absent)}")
        return files, weight_map
    files = [entry for entry in entries if entry.endswith(".safetensors")]
    if SINGLE_NAME in files:
        return [SINGLE_NAME], {}
    # consolidated* holds the same weights once more, under Mistral's own names
    files = [file for file in files if not file.startswith("consolidated")] or files
    if files:
        return files, {}
    others = [entry for entry in entries if entry.endswith(_OTHER_FORMATS)]
    if others:
        raise WeightsError(
            f"{folder}: no *.safetensors, only {_listing(others)}; accepted: safetensors. Pickled and GGUF weights "
            "are never opened; convert them first, for example with transformers: "
            "model.save_pretrained(folder, safe_serialization=True)"
        )
    raise WeightsError(f"{folder}: no weights; accepted: *.safetensors, with or without {INDEX_NAME}")


def _read_weight_map(path: Path) -> dict[str, str]:
    try:
        weight_map = read_json_object(path, max_bytes=_MAX_JSON_BYTES).get("weight_map")
    except ConfigError as error:
        raise WeightsError(str(error)) from error
    if not isinstance(weight_map, dict) or not 1 <= len(weight_map) <= _MAX_ENTRIES:
        got = f"{len(weight_map)} entries" if isinstance(weight_map, dict) else short_repr(weight_map)
        raise WeightsError(f"{path.name}: weight_map: {got}; accepted: an object of 1 to {_MAX_ENTRIES} entries")
    for name, file in weight_map.items():
        if not _is_plain_name(file):
            raise WeightsError(
                f"{path.name}: weight_map[{short_repr(name)}]={short_repr(file)}; "
                "accepted: the plain name of a .safetensors file in the same folder"
            )
    return weight_map


def _is_plain_name(file: Any) -> bool:
    """The name is judged and not where it leads, because the hub's cache links each file out of its folder."""
    return (
        isinstance(file, str)
        and len(file) <= 255
        and file.endswith(".safetensors")
        and file.isprintable()
        and not any(mark in file for mark in ("/", "\\", ":", ".."))
    )


def read_header(path: Path) -> tuple[list[TensorInfo], tuple[int, ...]]:
    """Check a safetensors file by its header and size.

    Returns:
        Its tensors by offset, and a stamp of the file that changes when it is written.

    Raises:
        WeightsError: the file is wrong, or changed while it was read.
    """
    try:
        before = os.stat(path)
        if not stat.S_ISREG(before.st_mode):
            raise WeightsError(f"{path.name}: not a file")
        with path.open("rb") as file:
            header = _header_bytes(file.read(8), before.st_size, path.name)
            text = file.read(header)
        after = os.stat(path)
    except OSError as error:
        raise WeightsError(f"{path.name}: cannot be read: {error.strerror}") from error
    if _stamp(before) != _stamp(after) or len(text) != header:
        raise WeightsError(f"{path.name}: changed while it was read; accepted: a file that nobody is writing")
    return _parse_header(text, before.st_size, path.name), _stamp(after)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _header_bytes(prefix: bytes, file_bytes: int, file: str) -> int:
    if len(prefix) < 8:
        raise WeightsError(f"{file}: {len(prefix)} bytes; accepted: at least 8, the length of the header")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > _MAX_JSON_BYTES:
        raise WeightsError(f"{file}: header of {length} bytes; accepted: at most {_MAX_JSON_BYTES}")
    if length > file_bytes - 8:
        raise WeightsError(
            f"{file}: truncated: expected at least {8 + length} bytes (header), the file has {file_bytes}"
        )
    return length


def _parse_header(text: bytes, file_bytes: int, file: str) -> list[TensorInfo]:
    if not text.startswith(b"{"):
        raise WeightsError(f"{file}: the header begins with {short_repr(text[:8])}; accepted: a JSON object")
    try:
        header = parse_json_object(text, "header")
    except ConfigError as error:
        raise WeightsError(f"{file}: {error}") from error
    metadata = header.pop("__metadata__", None)
    if metadata is not None and not (
        isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
    ):
        raise WeightsError(f"{file}: __metadata__={short_repr(metadata)}; accepted: an object of strings")
    if len(header) > _MAX_ENTRIES:
        raise WeightsError(f"{file}: {len(header)} tensors; accepted: at most {_MAX_ENTRIES}")
    infos = [_parse_entry(name, entry, file) for name, entry in header.items()]
    infos.sort(key=lambda info: (info.offset, info.num_bytes))
    data_start = 8 + len(text)
    end = 0
    for info in infos:
        if info.offset != end:
            what = "overlaps the one before" if info.offset < end else "leaves a hole before it"
            raise WeightsError(
                f"{file}: tensor {short_repr(info.name)} at offset {info.offset} {what}; accepted: {end}"
            )
        end += info.num_bytes
    if data_start + end != file_bytes:
        what = "truncated" if file_bytes < data_start + end else "bytes after the last tensor"
        raise WeightsError(f"{file}: {what}: expected {data_start + end} bytes, the file has {file_bytes}")
    return infos


def _parse_entry(name: str, entry: Any, file: str) -> TensorInfo:
    where = f"{file}: tensor {short_repr(name)}"
    if not isinstance(entry, dict) or set(entry) != {"dtype", "shape", "data_offsets"}:
        raise WeightsError(f"{where}: {short_repr(entry)}; accepted: an object of dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _BITS:
        raise WeightsError(f"{where}: dtype={short_repr(dtype)}; accepted: {', '.join(_BITS)}")
    if not _are_sizes(shape) or len(shape) > _MAX_DIMS:
        raise WeightsError(
            f"{where}: shape={short_repr(shape)}; accepted: at most {_MAX_DIMS} integers from 0 to 2**63 - 1"
        )
    if not _are_sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise WeightsError(f"{where}: data_offsets={short_repr(offsets)}; accepted: [begin, end] with begin <= end")
    bits = math.prod(shape) * _BITS[dtype]
    num_bytes = offsets[1] - offsets[0]
    if bits != 8 * num_bytes:
        raise WeightsError(
            f"{where}: shape {short_repr(shape)} of {dtype} takes {short_repr(bits)} bits, "
            f"data_offsets={offsets} hold {num_bytes} bytes"
        )
    return TensorInfo(name, dtype, tuple(shape), file, num_bytes, offsets[0])


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(item) is int and 0 <= item < 2**63 for item in value)


def _check_index(info: TensorInfo, index: tuple[slice, ...]) -> None:
    fits = len(index) <= len(info.shape) and all(
        part.step in (None, 1) and 0 <= (part.start or 0) <= (size if part.stop is None else part.stop) <= size
        for part, size in zip(index, info.shape, strict=False)
    )
    if not fits:
        raise WeightsError(f"{info.file}: {index} of tensor {info.name!r}; accepted: slices within shape {info.shape}")


# ---------------------------------------------------------------------------------------------------------------------
# What a model needs


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a whole model, as Hugging Face checkpoints have them."""
    D, V = config.hidden_size, config.vocab_size
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (V, D)}
    for i in range(config.num_layers):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in _layer_tensors(config).items()}
    shapes["model.norm.weight"] = (D,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (V, D)
    return shapes


def _layer_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    D, F, H = config.hidden_size, config.intermediate_size, config.head_dim
    q_dim, kv_dim = config.num_heads * H, config.num_kv_heads * H
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (D,),
        "self_attn.q_proj.weight": (q_dim, D),
        "self_attn.k_proj.weight": (kv_dim, D),
        "self_attn.v_proj.weight": (kv_dim, D),
        "self_attn.o_proj.weight": (D, q_dim),
        "post_attention_layernorm.weight": (D,),
        "mlp.gate_proj.weight": (F, D),
        "mlp.up_proj.weight": (F, D),
        "mlp.down_proj.weight": (D, F),
    }
    if config.qkv_bias:
        shapes |= {f"self_attn.{x}_proj.bias": (dim,) for x, dim in (("q", q_dim), ("k", kv_dim), ("v", kv_dim))}
    if config.o_bias:
        shapes["self_attn.o_proj.bias"] = (D,)
    if config.qk_norm:
        shapes |= {"self_attn.q_norm.weight": (H,), "self_attn.k_norm.weight": (H,)}
    return shapes


def is_ignored(name: str, config: ModelConfig) -> bool:
    """Whether a tensor may be in the file though the model does not read it: a tied head, or a RoPE buffer."""
    if name == "lm_head.weight":
        return config.tie_word_embeddings
    return name.endswith("rotary_emb.inv_freq")


def check_tensors(
    checkpoint: Checkpoint, expected: Mapping[str, tuple[int, ...]], *, ignored: Callable[[str], bool]
) -> None:
    """Compare a checkpoint with what a model needs; no data is read.

    Args:
        checkpoint: what is there.
        expected: shapes by name.
        ignored: tensors that may be there though not expected.

    Raises:
        WeightsError: one error that names up to 10 missing, unexpected, misshapen and mistyped tensors each.
    """
    missing = [name for name in expected if name not in checkpoint]
    unexpected, shapes, dtypes = [], [], []
    for info in map(checkpoint.info, checkpoint.names):
        if info.name not in expected:
            if not ignored(info.name):
                unexpected.append(f"{info.name} in {info.file}")
            continue
        if info.shape != expected[info.name]:
            shapes.append(f"{info.name} in {info.file} is {list(info.shape)}, expected {list(expected[info.name])}")
        if info.dtype not in LOADABLE_DTYPES:
            dtypes.append(f"{info.name} in {info.file} is {info.dtype}")
    problems = {
        "missing": missing,
        "unexpected": unexpected,
        "of wrong shape": shapes,
        f"of wrong dtype (accepted: {', '.join(LOADABLE_DTYPES)})": dtypes,
    }
    found = [f"{len(names)} tensors {what}: {_listing(names)}" for what, names in problems.items() if names]
    if found:
        raise WeightsError(f"{checkpoint.folder}: {'; '.join(found)}")


def load_parameters(
    module_params: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    *,
    progress: Callable[[int], None] | None = None,
) -> None:
    """Copy each named tensor of the checkpoint into the given parameter, in place, cast to its dtype.

    Args:
        module_params: allocated parameters by their names in the checkpoint, whole, on any device.
        checkpoint: where from; files are read in order of their offsets.
        progress: called with the bytes read for each parameter.

    Raises:
        WeightsError: a tensor is missing, has another shape or dtype, or cannot be read.
    """
    expected = {name: tuple(parameter.shape) for name, parameter in module_params.items()}
    check_tensors(checkpoint, expected, ignored=lambda _: True)
    for name in checkpoint.names:
        if name in module_params:
            with torch.no_grad():
                module_params[name].copy_(checkpoint.read(name))
            if progress is not None:
                progress(checkpoint.info(name).num_bytes)


def _listing(names: Iterable[str]) -> str:
    shown = list(names)
    more = f", and {len(shown) - _MAX_LISTED} more" if len(shown) > _MAX_LISTED else ""
    return ", ".join(name if len(name) <= 200 else name[:197] + "..." for name in shown[:_MAX_LISTED]) + more
