"""medha: serve long-context LLMs without convoys (the paper: "No Request Left Behind", arXiv 2409.17264).

The names below are the public surface. They are loaded on first use, so that ``import medha`` loads no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from medha.engine.engine import Engine
    from medha.llm import LLM
    from medha.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
    from medha.params import SLO, SamplingParams

_HOMES = {"LLM": "medha.llm", "Engine": "medha.engine.engine"}
_HOMES |= dict.fromkeys(("SLO", "SamplingParams"), "medha.params")
_HOMES |= dict.fromkeys(("CompletionOutput", "Logprob", "RequestMetrics", "RequestOutput"), "medha.outputs")

__all__ = ["LLM", "SLO", "CompletionOutput", "Engine", "Logprob", "RequestMetrics", "RequestOutput", "SamplingParams"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version  # here because it takes longer than all else

        return version("medha")
    if name not in _HOMES:
        raise AttributeError(f"module 'medha' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
