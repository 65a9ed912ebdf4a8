"""Read the tensors of a safetensors checkpoint: one file, or shards with an index.

The library checks every header (its length, the JSON, dtypes, shapes, offsets without a hole) when a file is opened; a
file that changes afterwards is not read, because the library would end the process with SIGBUS. Pickled weights are
never opened.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from medha.config import ModelConfig
from medha.errors import WeightsError, short_repr
from medha.models.decoder import Decoder
from medha.models.folder import parse_json_object, read_json_object
from medha.models.layers import local_part

logger = logging.getLogger("medha")

INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
LOADABLE_DTYPES = ("F32", "BF16", "F16")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

_MAX_INDEX_BYTES = 100_000_000
_PLAIN_NAME = re.compile(r"[\w .+-]{1,200}\.safetensors")
_MAX_NAME = 200
_MAX_LISTED = 10
_NUM_ROWS = 1024  # that are compared at once
_OTHER_FORMATS = (".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack")


class TensorInfo(NamedTuple):
    """One tensor of a checkpoint."""

    name: str
    dtype: str  # as safetensors writes it, for example BF16
    shape: tuple[int, ...]
    file: str  # in the folder


class Checkpoint(AbstractContextManager["Checkpoint"]):
    """The safetensors files of one model folder, headers checked, data mapped when first read."""

    def __init__(self, folder: Path) -> None:
        """Check the index and every header; no data is read. WeightsError says what is wrong with them."""
        self.folder = folder
        self.bytes_read = 0  # of tensors and slices
        self.tensors: dict[str, TensorInfo] = {}  # by name, in the order of files and offsets
        self._stamps: dict[str, tuple[int, ...]] = {}
        self._open: dict[str, Any] = {}  # safe_open handles, which safetensors leaves untyped
        files, weight_map = _find_files(folder)
        for file in files:
            infos, self._stamps[file] = _read_header(folder / file)
            for info in infos:
                if info.name in self.tensors:
                    raise WeightsError(f"{file}: tensor {info.name!r} is also in {self.tensors[info.name].file}")
                self.tensors[info.name] = info
        there = {(name, info.file) for name, info in self.tensors.items()}
        if lost := [f"{name!r} in {file}" for name, file in weight_map.items() if (name, file) not in there]:
            raise WeightsError(f"{INDEX_NAME}: lists {len(lost)} tensors that are not there: {_listing(lost)}")

    def read(self, name: str, index: tuple[slice, ...] | None = None) -> torch.Tensor:
        """A tensor, or a slice of it; only the pages of that slice are read from the file.

        ``index`` has one slice for each leading dimension, without steps. What is returned is on the CPU, in the dtype
        of the file, and may be mapped from it, so copy it before changing it.
        """
        name, *_, file = self.tensors[name]
        try:
            if _stamp(os.stat(self.folder / file)) != self._stamps[file]:
                raise WeightsError(f"{file}: changed since it was opened; accepted: a file that nobody is writing")
            if file not in self._open:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            handle = self._open[file]
            tensor: torch.Tensor = handle.get_slice(name)[index] if index else handle.get_tensor(name)
        except (SafetensorError, OSError, RuntimeError) as error:
            raise WeightsError(f"{file}: tensor {name!r} cannot be read: {error}") from error
        self.bytes_read += tensor.nbytes
        return tensor

    def __exit__(self, *error: object) -> None:
        """Let go of the mapped files; tensors already read stay valid."""
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)


def _find_files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """Names of the files to open, and the index's map from tensor to file (empty without an index)."""
    try:
        entries = sorted(os.listdir(folder))
    except OSError as error:
        raise WeightsError(f"{folder}: cannot be listed: {error.strerror}") from error
    if odd := [entry for entry in entries if entry.endswith(".safetensors") and not entry.isprintable()]:
        raise WeightsError(f"{folder}: a file called {odd[0]!r}; accepted: names of printable characters")
    if INDEX_NAME in entries:  # as in vLLM; transformers would take a model.safetensors beside it
        weight_map = _read_weight_map(folder / INDEX_NAME)
        files = sorted(set(weight_map.values()))
        absent = [file for file in files if file not in entries]
        if not absent:
            if SINGLE_NAME in entries and SINGLE_NAME not in files:
                logger.warning("%s: reads the files that %s lists, and not %s", folder, INDEX_NAME, SINGLE_NAME)
            return files, weight_map
        if absent != files or SINGLE_NAME not in entries:
            raise WeightsError(f"{INDEX_NAME}: lists {len(absent)} files that are not there: {_listing(absent)}")
        # transformers leaves the index where it saves one file over shards
        logger.warning("%s: reads %s; the files that %s lists are not there", folder, SINGLE_NAME, INDEX_NAME)
    files = [entry for entry in entries if entry.endswith(".safetensors")]
    if SINGLE_NAME in files:
        return [SINGLE_NAME], {}
    # consolidated* holds the same weights once more, under Mistral's own names
    if files := [file for file in files if not file.startswith("consolidated")] or files:
        return files, {}
    if others := [entry for entry in entries if entry.endswith(_OTHER_FORMATS)]:
        what = f"{folder}: no *.safetensors, only {_listing(others)}; accepted: safetensors"
        remedy = "convert them first, with model.save_pretrained(folder) of transformers"
        raise WeightsError(f"{what}. Pickled and GGUF weights are never opened; {remedy}")
    raise WeightsError(f"{folder}: no weights; accepted: *.safetensors, with or without {INDEX_NAME}")


def _read_header(path: Path) -> tuple[list[TensorInfo], tuple[int, ...]]:
    """The tensors of a safetensors file by offset, and a stamp of the file that changes when it is written.

    The library takes a key that is given twice, so the JSON is read once more here (safetensors README: an 8-byte
    little-endian length, JSON, then the data).
    """
    file = path.name
    try:
        before = os.stat(path)
        if not stat.S_ISREG(before.st_mode):
            raise WeightsError(f"{file}: not a file")
        with safe_open(path, framework="pt") as handle, path.open("rb") as raw:
            parse_json_object(raw.read(int.from_bytes(raw.read(8), "little")), file, error=WeightsError)
            tensors = [(name, handle.get_slice(name)) for name in handle.offset_keys()]
        after = os.stat(path)
    except (SafetensorError, OSError, RuntimeError) as error:
        size = f" (the file has {before.st_size} bytes)" if isinstance(error, SafetensorError) else ""
        raise WeightsError(f"{file}: {_shown(str(error))}{size}") from error
    if _stamp(before) != _stamp(after):
        raise WeightsError(f"{file}: changed while it was read; accepted: a file that nobody is writing")
    if odd := [name for name, _ in tensors if not name.isprintable() or len(name) > _MAX_NAME]:  # logs show them
        accepted = f"accepted: at most {_MAX_NAME} printable characters"
        raise WeightsError(f"{file}: tensor {short_repr(odd[0])}: its name; {accepted}")
    return [TensorInfo(name, part.get_dtype(), tuple(part.get_shape()), file) for name, part in tensors], _stamp(after)


def _stamp(status: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced or written: device, inode, size, time of change in nanoseconds."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _read_weight_map(path: Path) -> dict[str, str]:
    weight_map = read_json_object(path, max_bytes=_MAX_INDEX_BYTES, error=WeightsError).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise WeightsError(f"{path.name}: weight_map: {short_repr(weight_map)}; accepted: an object with entries")
    for name, file in weight_map.items():
        # The name is judged and not where it leads: the hub's cache links each file out of its folder.
        if not isinstance(file, str) or not _PLAIN_NAME.fullmatch(file) or ".." in file:
            accepted = "accepted: the plain name of a .safetensors file in the same folder"
            raise WeightsError(f"{path.name}: weight_map[{short_repr(name)}]={short_repr(file)}; {accepted}")
    return weight_map


def expected_tensors(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all tensors of a model, as in Hugging Face checkpoints."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in Decoder(config).named_parameters()}


def check_tensors(checkpoint: Checkpoint, config: ModelConfig) -> None:
    """Compare a checkpoint with what a whole model needs; no data is read but of a tied head and its embedding.

    One WeightsError names up to 10 missing, unexpected, misshapen and mistyped tensors each. A tied head that equals
    the embedding, and buffers of RoPE, may be there though the model does not read them. A tied head that is there
    alone is the embedding from here on.
    """
    if config.tie_word_embeddings and HEAD in checkpoint.tensors and EMBEDDING not in checkpoint.tensors:
        checkpoint.tensors[EMBEDDING] = checkpoint.tensors.pop(HEAD)
    expected = expected_tensors(config)
    mistyped = f"of wrong dtype (accepted: {', '.join(LOADABLE_DTYPES)})"
    problems: dict[str, list[str]] = {"missing": [], "unexpected": [], "of wrong shape": [], mistyped: []}
    problems["missing"] = [name for name in expected if name not in checkpoint.tensors]
    for name, info in checkpoint.tensors.items():
        where, shape = f"{info.name} in {info.file}", expected.get(name)
        if shape is None:
            is_tied = name == HEAD and config.tie_word_embeddings
            if not is_tied and not name.endswith("rotary_emb.inv_freq"):
                problems["unexpected"].append(where)
            continue
        if info.shape != shape:
            problems["of wrong shape"].append(f"{where} is {list(info.shape)}, expected {list(shape)}")
        if info.dtype not in LOADABLE_DTYPES:
            problems[mistyped].append(f"{where} is {info.dtype}")
    if found := [f"{len(names)} tensors {what}: {_listing(names)}" for what, names in problems.items() if names]:
        raise WeightsError(f"{checkpoint.folder}: {'; '.join(found)}")
    if config.tie_word_embeddings and HEAD in checkpoint.tensors and not _are_equal(checkpoint, EMBEDDING, HEAD):
        what = f"tie_word_embeddings=True, but {HEAD} is another than {EMBEDDING}"
        raise WeightsError(f"{checkpoint.folder}: {what}; accepted: tie_word_embeddings=False, or one weight")


def _are_equal(checkpoint: Checkpoint, *names: str) -> bool:
    """Whether two matrices hold the same bytes; some rows are read at a time, until they differ."""
    shape, other = (checkpoint.tensors[name].shape for name in names)
    if shape != other:
        return False
    pieces = [(slice(i, i + _NUM_ROWS),) for i in range(0, shape[0], _NUM_ROWS)]
    return all(torch.equal(*(checkpoint.read(name, rows).view(torch.uint8) for name in names)) for rows in pieces)


def load_parameters(
    parameters: Mapping[str, torch.Tensor],
    checkpoint: Checkpoint,
    index: Callable[[str, torch.Tensor], tuple[slice, ...] | None] = lambda name, parameter: None,
) -> None:
    """Copy each named tensor of the checkpoint, or a slice of it, into what this rank has of its parameter, in place,
    cast to its dtype.

    ``index`` says which slice of a tensor is wanted, None for the whole; files are read in order of their offsets.
    """
    for name in checkpoint.tensors:
        if name in parameters:
            local_part(parameters[name]).copy_(checkpoint.read(name, index(name, parameters[name])))


def _listing(names: Sequence[str]) -> str:
    more = f", and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(map(_shown, names[:_MAX_LISTED])) + more


def _shown(name: str) -> str:
    """A name for a terminal: what would steer it escaped, and cut."""
    name = name if name.isprintable() else repr(name)
    return name if len(name) <= _MAX_NAME else name[: _MAX_NAME - 3] + "..."
