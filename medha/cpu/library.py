"""The library of the CPU's own kernels, ``*.cpp`` beside this file, which the machine's compiler builds at first start.

It is kept under ``$XDG_CACHE_HOME/medha`` (``~/.cache/medha``), named by its sources, the compiler and the CPU. It is
put there whole by a rename, so that processes which build it at once do not meet; what torch has for this
(``torch.utils.cpp_extension.load``) waits without end for the lock of a build that was killed.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from ctypes import c_double, c_int, c_int64, c_void_p
from functools import cache
from pathlib import Path
from typing import Any

import torch

_SOURCES = tuple(sorted(Path(__file__).parent.glob("*.cpp")))
_HEADERS = tuple(sorted(Path(__file__).parent.glob("*.h")))
_FLAGS = ("-O3", "-march=native", "-std=c++17", "-shared", "-fPIC", "-fopenmp")
_BUILD_S = 120.0
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # of malloc.h


def lacks_products(dtype: torch.dtype) -> str | None:
    """In words that this CPU multiplies matrices of a dtype itself, which torch's libraries use and our kernel of
    products does not; else None."""
    if dtype == torch.float16 and torch.cpu._is_amx_fp16_supported():
        return "float16 as fast as torch's on a CPU with AMX for it"
    return None


@cache
def library() -> tuple[ctypes.CDLL | None, str | None]:
    """The kernels, compiled now if they have not been; or in words what is missing for that."""
    commands = filter(None, map(shlex.split, (os.environ.get("CXX", ""), "c++", "g++", "clang++")))
    compiler, *given = next((command for command in commands if shutil.which(command[0])), [""])
    if not compiler:
        return None, "a C++ compiler (c++, g++, clang++ or $CXX)"
    # Whether the CPU has tile registers (AMX) and the kernel gives them to this process, which this asks for.
    flags = (*given, *_FLAGS, f"-DMEDHA_MAY_TILE={int(torch.cpu._init_amx())}")
    try:
        kept = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "medha"
        path = kept / f"cpu-{_name_of_build(compiler, flags)}.so"
        if not path.exists() or not path.stat().st_size:  # as a power cut may leave it
            kept.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=kept) as scratch:
                made = Path(scratch) / path.name
                command = [compiler, *flags, *map(str, _SOURCES), "-o", str(made)]
                subprocess.run(command, check=True, capture_output=True, errors="replace", timeout=_BUILD_S)
                made.replace(path)
        _keep_freed_memory()
        return ctypes.CDLL(str(path)), None
    except subprocess.CalledProcessError as error:
        said = next((line for line in error.stderr.splitlines() if "error" in line), error.stderr.strip())
        return None, f"a C++ compiler that takes {Path(__file__).parent.name}/*.cpp ({compiler}: {said[:200]})"
    except (OSError, RuntimeError, subprocess.TimeoutExpired) as error:
        return None, f"its kernel, which {compiler} could not build or keep ({error})"


def _keep_freed_memory() -> None:
    """Have glibc keep what tensors of up to 32 MiB leave for those that follow: a page that the system gives anew takes
    a tenth of the time in which a small model computes what lies on it."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 1 << 25)
        mallopt(_M_TRIM_THRESHOLD, 1 << 29)


_ARGUMENTS = {
    "attend": [*[c_void_p] * 3, *[c_int64] * 3, *[c_void_p] * 2, *[c_int64] * 4, *[c_void_p] * 5, c_int64, c_int],
    "linear": [c_void_p] * 4 + [c_int64] * 5,
    "merge": [*[c_void_p] * 2, *[c_int64] * 3, *[c_void_p] * 2, c_int],
    "rmsnorm": [c_void_p] * 4 + [c_int64] * 3 + [c_double],
    "rotate": [c_void_p] * 2 + [c_int64] * 5,
    "tell": [c_void_p, c_int],
    "wait_for": [c_void_p, c_int, c_int64, c_int64],
    "write_tokens": [c_void_p] * 4 + [c_int64] * 7,
}
_RESULTS = {"wait_for": c_int}


@cache
def function(name: str, dtype: torch.dtype | None = None) -> Callable[..., Any]:
    """A kernel of this name, for a dtype if there is one for each; it is given pointers alone."""
    kernels, missing = library()
    assert kernels is not None, missing
    found = getattr(kernels, name if dtype is None else f"{name}_{str(dtype).removeprefix('torch.')}")
    found.argtypes, found.restype = _ARGUMENTS[name], _RESULTS.get(name)
    return found  # type: ignore[no-any-return]


def _name_of_build(compiler: str, flags: tuple[str, ...]) -> str:
    command = [compiler, "--version"]
    version = subprocess.run(command, check=True, capture_output=True, errors="replace", timeout=_BUILD_S).stdout
    facts = Path("/proc/cpuinfo")
    lines = facts.read_text().splitlines(True) if facts.exists() else []
    cpu = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    sources = (path.read_text() for path in (*_SOURCES, *_HEADERS))
    parts = (*sources, *flags, version, platform.machine(), platform.processor(), cpu)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:20]
