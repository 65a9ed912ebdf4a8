"""What comes back of a request: tokens, text, when what happened, and where its time to first token went."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from medha.params import SLO


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the seconds from a request's arrival to its first token went, or up to the last tick while it has none."""

    request_id: str  # ``slot N`` where the explainer was told none, also in ``others``
    has_first_token: bool  # whether total_s is the TTFT
    total_s: float  # sum of the parts
    own_s: float  # computing its own chunks
    decodes_s: float
    others_s: float  # chunks of other requests
    others: tuple[tuple[str, float], ...]  # (request id, seconds), the largest, as far back as chunks are kept
    memory_s: float  # waiting for KV memory
    pipeline_s: float  # in flight beyond the busy time of its group
    idle_s: float  # nothing was in flight
    # samples of (seconds since arrival, seconds for which it could still wait and be in time); none without a deadline
    slack_s: tuple[tuple[float, float], ...]
    decode_wait_s: float = 0.0  # from the first token until a decode instance had it; beside total_s

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts by name: ``own``, ``decodes``, ``others``, ``memory``, ``pipeline``, ``idle``."""
        return {name: getattr(self, f"{name}_s") for name in ("own", "decodes", "others", "memory", "pipeline", "idle")}

    def text(self, name: Callable[[str], str] = str) -> str:
        """A few lines for a person; ``name`` says how a request id is shown."""
        what = "TTFT" if self.has_first_token else "no first token after"
        top = ", ".join(f"{name(request_id)} {seconds:.3f}" for request_id, seconds in self.others)
        samples = ", ".join(f"{slack_s:+.3f} at {at_s:.3f}" for at_s, slack_s in self.slack_s)
        others = f"other prefills {self.others_s:.3f}" + (f" ({top})" if top else "")
        lines = [f"{name(self.request_id)}: {what} {self.total_s:.3f} s"]
        lines.append(f"  own compute {self.own_s:.3f}, decodes {self.decodes_s:.3f}, {others}")
        lines.append(f"  memory {self.memory_s:.3f}, pipeline {self.pipeline_s:.3f}, idle {self.idle_s:.3f}")
        if self.decode_wait_s:
            lines.append(f"  waiting for decode {self.decode_wait_s:.3f}, behind the first token")
        return "\n".join([*lines, *([f"  slack {samples}"] if samples else [])])


FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True, slots=True)
class Logprob:
    """Natural logarithm of a token's probability under the model's own distribution, before any sampling transform."""

    logprob: float
    rank: int  # 1 for the likeliest
    decoded_token: str | None = None  # what it adds to the text; None without a tokenizer


@dataclass(slots=True)
class RequestMetrics:
    """When things happened to one request: seconds of one monotonic clock whose zero is the engine's start.

    Of several completions the first token is that of any, the end that of the last, counts are sums, and ``tpot`` is
    over the tokens that a completion has on average.
    """

    arrival: float
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_chunks: int = 0
    num_preemptions: int = 0  # how often it gave up its KV memory
    num_swaps: int = 0  # how many of these moved what was computed to host memory
    work_lost_s: float = 0.0  # predicted, of computing it again or moving it
    ttft_slo_s: float | None = None
    tpot_slo_s: float | None = None
    deadline_s: float | None = None  # by which the scheduler went, from arrival to first token; None is no deadline
    deadline_is_derived: bool = False  # from the predicted prefill time, as there is no TTFT objective
    is_relegated: bool = False  # served without a deadline, as its objective could not be met, which counts as missed
    explanation: Explanation | None = None  # once it has a first token or has ended, unless refused or lost
    num_completions: int = 1
    num_cached_tokens: int = 0  # of the prompt, which others had computed

    @property
    def queue_time(self) -> float | None:
        """Arrival to first chunk, seconds."""
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        """Arrival to first token, seconds."""
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def e2e(self) -> float | None:
        """Arrival to end, seconds."""
        return None if self.finished is None else self.finished - self.arrival

    @property
    def tpot(self) -> float | None:
        """Mean time between tokens after the first, seconds; None with fewer than two tokens."""
        num_more = self.num_output_tokens / self.num_completions - 1
        if self.finished is None or self.first_token is None or num_more <= 0:
            return None
        return (self.finished - self.first_token) / num_more

    @property
    def met_slo(self) -> bool | None:
        """Whether every objective given was met; None when none was given."""
        pairs = ((self.ttft_slo_s, self.ttft), (self.tpot_slo_s, self.tpot))
        given = [(limit, value) for limit, value in pairs if limit is not None]
        if not given:
            return None
        if self.is_relegated or self.finished is None or self.first_token is None:
            return False
        return all(value is None or value <= limit for limit, value in given)


@dataclass(slots=True)
class CompletionOutput:
    """The generated part of a request, or one of its ``n``."""

    index: int  # which of the n, from 0
    text: str | None  # None without a tokenizer or with detokenize=False
    token_ids: list[int]
    finish_reason: FinishReason | None = None  # None only while unfinished
    stop_reason: str | int | None = None  # the stop string or token id that ended it; None for end-of-sequence
    logprobs: list[dict[int, Logprob]] | None = None  # one mapping of token id to Logprob a token, if asked for
    cumulative_logprob: float | None = None  # sum over the generated tokens, if asked for


@dataclass(slots=True)
class RequestOutput:
    """State of one request as a user sees it."""

    request_id: str
    prompt: str | None  # its text, that of messages as the chat template wrote it; None where ids were given
    prompt_token_ids: list[int]  # the same list in every output of a request
    outputs: list[CompletionOutput]  # by index; as ``delta`` those that have something new
    finished: bool
    metrics: RequestMetrics  # while it is not finished, of one completion, they go on counting
    error: Exception | None = None  # what went wrong when finish_reason is error; the tokens before it are kept
    num_cached_tokens: int = 0  # of the prompt, which others had computed


def unserved(
    request_id: str, arrival_s: float, *, slo: SLO | None, error: Exception | None, finished_s: float | None = None
) -> RequestOutput:
    """The output of a request that the engine never took; without an error it is aborted."""
    slo = slo or SLO()
    completion = CompletionOutput(0, text=None, token_ids=[], finish_reason="abort" if error is None else "error")
    metrics = RequestMetrics(arrival_s, finished=finished_s, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
    return RequestOutput(request_id, None, [], [completion], True, metrics, error)
