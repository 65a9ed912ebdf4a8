"""Distributions of prompt and output lengths, in tokens: named ones that have the published figures of real workloads.

``sharegpt4-8k``
    ShareGPT4 conversations of at most 8192 tokens: 21 quantiles each of prompt and output, from
    ``sharegpt_8k_filtered_stats_llama2_tokenizer.csv`` of microsoft/sarathi-serve (Apache-2.0; 30,731 conversations,
    Llama-2 tokenizer). Their median output, 415, is the one that arXiv:2409.17264 section 6.1 states. Prompt and output
    are drawn independently (rank correlation in that file: 0.05), and an output is cut where the total would exceed
    8192.
``medha-swe``
    The MEDHA-SWE trace of arXiv:2409.17264 section 6.1, which is not public: prefill P50 393K and P90 839K, decode P50
    518 and P90 808. Within 128K to 1M, the range that section 6.2 states; the shape between those points is ours.
``medha-mix``, ``medha-mix-2m``
    ``sharegpt4-8k`` with 5 % of ``medha-swe`` (section 6.2); in ``2m`` its prompts are doubled, up to 2M (section 6.3
    scales them without saying how).
``tetris-short``, ``tetris-medium``, ``tetris-long``
    The traces of the Tetris paper, of which range and mean of the sequence length are published: the distribution of
    largest entropy with these, an exponential cut to the range. Outputs are not published; those of ``sharegpt4-8k``
    are taken.
``fixed:P,D`` and ``uniform:A-B,C-D``
    P prompt and D output tokens; or uniform integers, both ends included.

K is 1000, but for the lower end of the long requests, 128 x 1024: the range lies in that of either reading.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from medha.config import parse_size
from medha.errors import ConfigError
from medha.workload.trace import MAX_TOKENS

Quantile = Callable[[NDArray[np.float64]], NDArray[np.float64]]
"""From levels in [0, 1) to lengths."""

LONG_SHARE = 0.05
_BLOCK = 65_536

_LEVELS = (
    0,
    0.01,
    0.02,
    0.05,
    0.1,
    0.15,
    0.2,
    0.25,
    0.3,
    0.4,
    0.5,
    0.6,
    0.7,
    0.75,
    0.8,
    0.85,
    0.9,
    0.95,
    0.98,
    0.99,
    1,
)
# fmt: off
_SHAREGPT_PROMPT = (
    1, 12, 16, 29, 74, 180, 382, 580, 777, 1203, 1730, 2401, 3235, 3734, 4278, 4918, 5696, 6563, 7164, 7434, 8141,
)
_SHAREGPT_OUTPUT = (
    2, 6, 19, 44, 84, 130, 181, 228, 271, 346, 415, 493, 581, 628, 683, 754, 834, 920, 975, 998, 1024,
)
# fmt: on


@dataclass(frozen=True, slots=True)
class Lengths:
    """Lengths of a kind of request, or of two kinds.

    Attributes:
        prompt, output: their quantile functions; draws are independent.
        max_total: outputs are cut so that prompt and output together have at most so many tokens.
        long: another kind, of which ``long_share`` of the requests are, each by its own draw.
    """

    prompt: Quantile
    output: Quantile
    max_total: int | None = None
    long: Lengths | None = None
    long_share: float = 0.0

    def sample(self, rng: np.random.Generator, num_requests: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw prompt and output tokens, int64; the first n requests are the same however many follow."""
        prompts, outputs = (np.empty(num_requests, np.int64) for _ in range(2))
        for start in range(0, num_requests, _BLOCK):
            part = slice(start, min(start + _BLOCK, num_requests))
            levels = rng.random((part.stop - start, 3)).T
            prompts[part], outputs[part] = self._at(levels)
            if self.long is not None:
                is_long = levels[2] < self.long_share
                for column, drawn in zip((prompts, outputs), self.long._at(levels), strict=True):
                    column[part][is_long] = drawn[is_long]
        return prompts, outputs

    def _at(self, levels: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        prompts, outputs = np.rint(self.prompt(levels[0])), np.rint(self.output(levels[1]))
        if self.max_total is not None:
            outputs = np.minimum(outputs, self.max_total - prompts)
        return prompts, outputs


def knots(levels: tuple[float, ...], values: tuple[float, ...]) -> Quantile:
    """Straight lines between given quantiles."""
    return lambda u: np.interp(u, levels, values)


def geometric_knots(levels: tuple[float, ...], values: tuple[float, ...]) -> Quantile:
    """Straight lines between the logarithms of given quantiles, for lengths that span orders of magnitude."""
    return lambda u: np.exp(np.interp(u, levels, np.log(values)))


def uniform(low: int, high: int) -> Quantile:
    """Integers from ``low`` to ``high``, both included."""
    return lambda u: np.minimum(np.floor(low + u * (high - low + 1)), high)  # a level just below 1 may round up


def cut_exponential(low: float, high: float, mean: float) -> Quantile:
    """An exponential distribution from ``low``, cut at ``high``, with the given mean, which is below their middle."""
    width = high - low

    def mean_at(rate: float) -> float:
        return low + 1 / rate - width / math.expm1(rate * width)

    slow, fast = 1e-3 / width, 500 / width
    for _ in range(200):  # the mean falls as the rate grows
        rate = (slow + fast) / 2
        slow, fast = (rate, fast) if mean_at(rate) > mean else (slow, rate)
    return lambda u: low - np.log1p(u * math.expm1(-rate * width)) / rate


@lru_cache(maxsize=1)
def named_lengths() -> dict[str, Lengths]:
    """The distributions that have names."""
    output = knots(_LEVELS, _SHAREGPT_OUTPUT)
    short = Lengths(knots(_LEVELS, _SHAREGPT_PROMPT), output, max_total=8192)
    swe_output = geometric_knots((0, 0.1, 0.5, 0.9, 0.99, 1), (64, 332, 518, 808, 1161, 2048))
    swe = _swe(1, swe_output)
    tetris = {"short": (4e3, 95e3, 23.6e3), "medium": (8e3, 142e3, 32.8e3), "long": (16e3, 190e3, 50.1e3)}
    return {
        "sharegpt4-8k": short,
        "medha-swe": swe,
        "medha-mix": Lengths(short.prompt, output, 8192, long=swe, long_share=LONG_SHARE),
        "medha-mix-2m": Lengths(short.prompt, output, 8192, long=_swe(2, swe_output), long_share=LONG_SHARE),
        **{f"tetris-{name}": Lengths(cut_exponential(*figures), output) for name, figures in tetris.items()},
    }


def _swe(scale: int, output: Quantile) -> Lengths:
    prompts = (131_072.0 * scale, 393e3 * scale, 839e3 * scale, 1e6 * scale)
    return Lengths(geometric_knots((0, 0.5, 0.9, 1), prompts), output)


def _length(text: str) -> int:
    return parse_size(text) if text.strip("0") else 0


def parse_lengths(spec: str) -> Lengths:
    """The distribution of a name, of ``fixed:P,D``, or of ``uniform:A-B,C-D``.

    Raises:
        ConfigError: it is none of these, or a length is outside of 1 to MAX_TOKENS.
    """
    if spec in named_lengths():
        return named_lengths()[spec]
    match = re.fullmatch(r"fixed:(N),(N)|uniform:(N)-(N),(N)-(N)".replace("N", r"\d{1,9}[kKmM]?"), spec, re.ASCII)
    p, d, *ends = (_length(text) for text in match.groups("0")) if match else (0,) * 6
    a, b, c, e = ends if any(ends) else (p, p, d, d)
    if not (1 <= a <= b <= MAX_TOKENS and 1 <= c <= e <= MAX_TOKENS):
        raise ConfigError(
            f"lengths={spec!r:.80}; accepted: {', '.join(named_lengths())}, fixed:P,D or uniform:A-B,C-D with "
            f"1 to {MAX_TOKENS} tokens"
        )
    return Lengths(uniform(a, b), uniform(c, e))
