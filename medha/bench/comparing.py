"""What the parts of ``medha bench compare`` share: the two models, and a line of the result."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from medha.bench.timing import Timing
from medha.llm import LLM

BLOCK_SIZE = 256


@dataclass(frozen=True, slots=True)
class Pair:
    """The same weights in both.

    Attributes:
        dtype: its name.
        llm: medha's.
        reference: a ``transformers.LlamaForCausalLM``.
    """

    dtype: str
    llm: LLM
    reference: Any


@dataclass(frozen=True, slots=True)
class Comparison:
    """One line of the result; ``ratio`` above 1 means that medha is faster.

    Attributes:
        name: what was run.
        dtype: of weights and KV cache.
        medha, transformers: seconds.
        num_requests, num_equal: how many there are, and of how many every token is the same.
        is_padded: transformers had other lengths in its batch, so its sums are not in the same order.
    """

    name: str
    dtype: str
    medha: Timing
    transformers: Timing
    num_requests: int
    num_equal: int
    is_padded: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        dtype: str,
        medha: Timing,
        transformers: Timing,
        *,
        tokens: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        is_padded: bool = False,
    ) -> Comparison:
        """From the tokens of each request on both sides, in the same order."""
        equal = [list(ours) == list(theirs) for ours, theirs in zip(*tokens, strict=True)]
        return cls(name, dtype, medha, transformers, len(equal), sum(equal), is_padded)

    @property
    def ratio(self) -> float:
        """transformers' median over medha's."""
        return self.transformers.median_s / self.medha.median_s

    @property
    def same_tokens(self) -> bool:
        """Whether all are."""
        return self.num_equal == self.num_requests

    @property
    def is_exact(self) -> bool:
        """Whether all have to be: no tie can be turned by rounding to 16 bits, or by padding."""
        return self.dtype == "float32" and not self.is_padded

    @property
    def tokens_text(self) -> str:
        """How many are the same, for a table."""
        if self.same_tokens:
            return "equal"
        text = f"{self.num_equal:,} of {self.num_requests:,}"
        return f"DIFFER: {text}" if self.is_exact else text

    def report(self) -> dict[str, Any]:
        """Its fields, and what follows from them."""
        return asdict(self) | {"ratio": self.ratio, "same_tokens": self.same_tokens}
