"""Find the folder of a model: a local one as it is, or a snapshot fetched from the Hugging Face hub.

Only safetensors, JSON, templates and tokenizer files are fetched; pickled weights never are. Offline mode
(``HF_HUB_OFFLINE``) and the cache folder are huggingface_hub's own.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from medha.errors import ModelLoadError

ALLOW_PATTERNS = ("*.safetensors", "*.json", "*.jinja", "tokenizer.model")
IGNORE_PATTERNS = ("*/*.safetensors",)  # weights in subfolders are other formats of the same model

_ACCEPTED = "accepted: a folder with config.json and *.safetensors, or a hub id such as org/name"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", re.ASCII)


def resolve_model(model: str, *, revision: str | None = None, with_weights: bool = True) -> Path:
    """The local folder of a model; where there is none of that name and it is a hub id (``org/name``), it is fetched:
    of a ``revision`` (branch, tag or commit), ``with_weights`` or without."""
    path = Path(model).expanduser() if model.startswith("~") else Path(model)
    try:
        if path.is_dir() and model:
            with os.scandir(path):  # lists nothing; fails where the folder cannot be read
                return path
        if path.is_symlink() and not path.exists():
            raise ModelLoadError(f"model {model!r} is a dangling symlink to {os.readlink(path)!r}; {_ACCEPTED}")
        if path.exists():
            raise ModelLoadError(f"model {model!r} is a file, not a folder; {_ACCEPTED}")
    except (OSError, UnicodeError) as error:
        raise ModelLoadError(f"model {model!r} cannot be read: {error}; {_ACCEPTED}") from error
    if not _HUB_ID.fullmatch(model):
        raise ModelLoadError(f"model {model!r}: no such folder, and not a hub id; {_ACCEPTED}")
    from huggingface_hub import snapshot_download

    patterns = list(ALLOW_PATTERNS if with_weights else ALLOW_PATTERNS[1:])
    try:
        return Path(
            snapshot_download(model, revision=revision, allow_patterns=patterns, ignore_patterns=list(IGNORE_PATTERNS))
        )
    except Exception as error:  # which classes the hub raises depends on its version and its HTTP library
        at = "" if revision is None else f" at revision {revision!r}"
        raise ModelLoadError(
            f"model {model!r}{at}: no such folder here, and the hub did not deliver it "
            f"({type(error).__name__}: {error}); {_ACCEPTED}"
        ) from error
