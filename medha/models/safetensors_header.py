"""Read and check the header of a safetensors file.

The library loads a key given twice without a word and names no file in its errors, so each header is checked here
first. Format: the safetensors README (an 8-byte little-endian length, JSON, then the data). Standard library only.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from medha.errors import ConfigError, WeightsError
from medha.models.json_fields import parse_json_object, short_repr

MAX_JSON_BYTES = 100_000_000
MAX_ENTRIES = 10**6

_MAX_DIMS = 64
_MAX_NAME = 200
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
    if file_stamp(before) != file_stamp(after) or len(text) != header:
        raise WeightsError(f"{path.name}: changed while it was read; accepted: a file that nobody is writing")
    return _parse_header(text, before.st_size, path.name), file_stamp(after)


def file_stamp(status: os.stat_result) -> tuple[int, ...]:
    """What changes when a file is replaced or written: device, inode, size, time of change in nanoseconds."""
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _header_bytes(prefix: bytes, file_bytes: int, file: str) -> int:
    if len(prefix) < 8:
        raise WeightsError(f"{file}: {len(prefix)} bytes; accepted: at least 8, the length of the header")
    length: int = struct.unpack("<Q", prefix)[0]
    if length > MAX_JSON_BYTES:
        raise WeightsError(f"{file}: header of {length} bytes; accepted: at most {MAX_JSON_BYTES}")
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
    if len(header) > MAX_ENTRIES:
        raise WeightsError(f"{file}: {len(header)} tensors; accepted: at most {MAX_ENTRIES}")
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
    if not name.isprintable() or len(name) > _MAX_NAME:  # messages and logs may show it as it is from here on
        raise WeightsError(f"{where}: its name; accepted: at most {_MAX_NAME} printable characters")
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
