"""A request from its admission to its last output: its prompt, its tokens, its text, and when it ends."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field, replace
from functools import cached_property, partial

import numpy as np
import numpy.typing as npt

from medha.engine.prefix import PrefixIds
from medha.engine.threads import pieces
from medha.errors import NonFiniteLogitsError
from medha.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput, unserved
from medha.params import PRIORITIES, SLO, SamplingParams
from medha.sched.decision import Admitted, Preempted, SchedulerRequest
from medha.sched.prefix import ID_BYTES
from medha.text import Detokenizer, StopChecker, Tokenizer
from medha.worker.sampling import Sampled

logger = logging.getLogger("medha")

Sink = Callable[[RequestOutput], None]
"""Takes the outputs of a request."""

_SUMS = ("num_output_tokens", "num_chunks", "num_preemptions", "num_swaps", "work_lost_s")


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against."""

    vocab_size: int
    max_model_len: int  # prompt plus output in tokens
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float | int | None] = field(default_factory=dict)  # from generation_config.json
    seed: int = 0  # base of the seeds of requests that bring none
    most_new_tokens: int | None = None  # of a completion, where that is bounded apart

    @property
    def default_params(self) -> SamplingParams:
        """Those of a request that brings none."""
        return SamplingParams(max_tokens=None).resolve({"max_tokens": 16, **self.sampling_defaults})


@dataclass(eq=False, repr=False)
class Request:
    """A request that has been tokenised and checked; once it is queued it has completions."""

    request_id: str
    prompt: str | None  # its text, that of messages as the chat template wrote it; None where ids were given
    prompt_ids: npt.NDArray[np.int32]  # its tokens, a copy of our own; the runner reads this array, without a copy
    params: SamplingParams  # every field has a value, and max_tokens fits the room after the prompt
    eos_ids: frozenset[int]  # that end a sequence, unless they are to be ignored
    slo: SLO | None = None
    priority: str = "normal"
    tenant: str = ""
    prefix: bytes = b""  # ids of its prompt's units, where what is computed of it is shared
    completions: tuple[Completion, ...] = ()  # by index; none until it is queued

    def __post_init__(self) -> None:
        self.num_running = self.params.n  # completions that have not ended
        self.sink: Sink  # takes its outputs, once it is queued

    @property
    def max_tokens(self) -> int:
        """Most tokens of a completion."""
        assert self.params.max_tokens is not None, "admission has capped it"
        return self.params.max_tokens

    @cached_property
    def prompt_token_ids(self) -> list[int]:
        """The tokens as the list that outputs hold; made piece by piece, so that whoever decodes is not stalled."""
        ids: list[int] = []
        for part in pieces(len(self.prompt_ids)):
            ids += self.prompt_ids[part].tolist()
        return ids

    def asked(self, slot: int, arrival_s: float) -> SchedulerRequest:
        """What a scheduler is to know of a completion of it."""
        head = slot, len(self.prompt_ids), self.max_tokens, arrival_s, self.slo, PRIORITIES.index(self.priority)
        return SchedulerRequest(*head, tenant=self.tenant, prefix=self.prefix)

    def refused(self, arrival_s: float, now_s: float, error: Exception) -> RequestOutput:
        """Its output where the engine does not take it."""
        output = unserved(self.request_id, arrival_s, slo=self.slo, error=error, finished_s=now_s)
        output.metrics.num_prompt_tokens = len(self.prompt_ids)
        return replace(output, prompt=self.prompt, prompt_token_ids=self.prompt_token_ids)

    @property
    def first(self) -> Completion:
        """The completion with the first token, or that of index 0."""
        times = [completion.metrics.first_token for completion in self.completions]
        return self.completions[times.index(min((time for time in times if time is not None), default=None))]

    def emit(self) -> None:
        """Hand out the request as it is now; with ``output_kind`` ``delta``, what was not handed out before."""
        is_delta, chosen = self.params.output_kind == "delta", self.completions
        outputs = [one.output(is_delta=is_delta) for one in chosen if one.has_news or not is_delta]
        error = next((one.error for one in chosen if one.error is not None), None)
        metrics = chosen[0].metrics if len(chosen) == 1 else self._metrics()
        ids, ended, cached = self.prompt_token_ids, self.num_running == 0, metrics.num_cached_tokens
        self.sink(RequestOutput(self.request_id, self.prompt, ids, outputs, ended, metrics, error, cached))

    def _metrics(self) -> RequestMetrics:
        """Of several completions together."""
        total = replace(self.first.metrics)
        parts = [completion.metrics for completion in self.completions]
        begun = [part.first_scheduled for part in parts if part.first_scheduled is not None]
        ends = [part.finished for part in parts if part.finished is not None]
        total.first_scheduled = min(begun, default=None)
        total.finished = max(ends) if len(ends) == len(parts) else None
        for name in _SUMS:
            setattr(total, name, sum(getattr(part, name) for part in parts))
        total.num_completions = len(parts)
        return total


@dataclass(eq=False, repr=False)
class Completion:
    """One of the completions of a request: what it has produced, and when it ends.

    Attributes:
        end_ids: end-of-sequence and stop ids; one of them ends it.
    """

    request: Request  # a weak reference once the slot is closed
    index: int
    slot: int  # its handle in scheduler and runner
    arrival_s: InitVar[float]
    tokenizer: Tokenizer | None

    def __post_init__(self, arrival_s: float) -> None:
        request, params, slo = self.request, self.request.params, self.request.slo or SLO()
        self.end_ids = request.eos_ids.union(params.stop_token_ids or ())
        self.metrics = RequestMetrics(arrival_s, ttft_slo_s=slo.ttft_s, tpot_slo_s=slo.tpot_s)
        self.metrics.num_prompt_tokens = len(request.prompt_ids)
        self.token_ids: list[int] = []
        self.num_computed_tokens = 0  # tokens of it that are done in every stage, in host memory too
        self.computed_s = arrival_s  # when its last chunk was
        self.finish_reason: FinishReason | None = None  # why it has ended; None while it runs
        self.error: Exception | None = None
        self._stop_reason: str | int | None = None
        self._detokenizer: Detokenizer | None = None
        if self.tokenizer is not None and params.detokenize:
            last, skips = int(request.prompt_ids[-1]), params.skip_special_tokens
            self._detokenizer = Detokenizer(self.tokenizer, after=last, skip_special_tokens=skips)
        self._has_stops, self._has_logprobs = bool(params.stop), params.logprobs is not None
        # else it is decoded at the end
        self._streams_text = self._detokenizer is not None and (self._has_stops or params.output_kind != "final_only")
        self._hides_end = False  # its last token is not part of the text
        self._stops = StopChecker(params.stop or (), include_stop_str_in_output=params.include_stop_str_in_output)
        self._pieces: list[str] = []  # of the text, of deltas what is not out yet
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._reported: tuple[int, bool] = (0, False)  # tokens, the end
        # whose ids were made, and the last of these
        self._num_units, self._last_id = len(request.prefix) // ID_BYTES, request.prefix[-ID_BYTES:]

    @property
    def name(self) -> str:
        """What people call it: the request's id, with the index where there are several."""
        request = self.request
        return request.request_id if request.params.n == 1 else f"{request.request_id}[{self.index}]"

    def __str__(self) -> str:
        its, out = self.metrics, f"{len(self.token_ids)} of {self.request.params.max_tokens} out"
        counts = f"{its.num_chunks} chunks, {its.num_preemptions} preemptions"
        return f"{self.name!r:.80} in slot {self.slot}: {its.num_prompt_tokens} prompt tokens, {out}, {counts}"

    @property
    def is_prefilling(self) -> bool:
        """Whether it has been scheduled, and runs, and its first token is not out."""
        return self.metrics.first_scheduled is not None and not self.token_ids and self.finish_reason is None

    @property
    def has_news(self) -> bool:
        """Whether a delta has something."""
        return bool(self._pieces) or self._reported != (len(self.token_ids), self.finish_reason is not None)

    def admitted(self, its: Admitted) -> None:
        """Note what the scheduler has made of it."""
        if its.alone_tpot_s is not None:
            message = "request %s: slo.tpot_s=%s does not bound batches: a token takes %.4f s even alone, as predicted"
            logger.warning(message, self.name, self.metrics.tpot_slo_s, its.alone_tpot_s)
        metrics = self.metrics
        metrics.is_relegated = its.is_relegated
        metrics.deadline_s = its.deadline_s if math.isfinite(its.deadline_s) else None
        metrics.deadline_is_derived = metrics.deadline_s is not None and metrics.ttft_slo_s is None

    def scheduled(self, now_s: float) -> None:
        """Note that a chunk of it is in a batch."""
        if self.metrics.first_scheduled is None:
            self.metrics.first_scheduled = now_s
        self.metrics.num_chunks += 1

    def found(self, num_tokens: int) -> None:
        """Note that it began behind tokens that were there; what it finds again once preempted does not count."""
        if self.metrics.num_chunks == 1:
            self.metrics.num_cached_tokens += num_tokens

    def gave_way(self, preempted: Preempted) -> None:
        """Note that it was preempted."""
        self.num_computed_tokens = preempted.swapped_tokens
        self.metrics.num_preemptions += 1
        self.metrics.num_swaps += preempted.swapped_tokens > 0
        self.metrics.work_lost_s += preempted.lost_s

    def take(self, sampled: Sampled, now_s: float) -> bool:
        """Append a sampled token; returns whether this has ended with it."""
        token, is_finite, logprobs = sampled
        if not is_finite:
            what = f"the model returned NaN or infinite logits for token {len(self.token_ids)}"
            self.finish("error", now_s, error=NonFiniteLogitsError(f"request {self.name!r}: {what}"))
            return True
        metrics, ids = self.metrics, self.token_ids
        ids.append(token)
        metrics.num_output_tokens += 1
        if metrics.first_token is None:
            metrics.first_token = now_s
        if logprobs is not None:
            self._cumulative_logprob += logprobs[0][1]  # of the drawn one; then come the likeliest
            self._logprobs.append({i: Logprob(value, rank, self._text_of(i)) for i, value, rank in logprobs})
        ends = token in self.end_ids
        if ends:
            self._hides_end = not self.request.params.include_stop_str_in_output
        if self._streams_text and not self._hides_end:
            assert self._detokenizer is not None, "text is streamed where there is any"
            self._add_text(self._detokenizer.push(token))
        if ends or self._stops.matched is not None:
            self._stop_reason = self._stops.matched or (None if token in self.request.eos_ids else token)
            self.finish("stop", now_s)
        elif len(ids) >= self.request.max_tokens:
            self.finish("length", now_s)
        return self.finish_reason is not None

    def finish(
        self, reason: FinishReason, now_s: float, *, error: Exception | None = None, flush_text: bool = True
    ) -> None:
        """End it, unless it has ended before; ``flush_text`` adds the text held back for the next token, which may
        complete a stop string."""
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self.request.num_running -= 1
        self.metrics.finished = now_s
        self.error = error
        if self._detokenizer is None or not flush_text:
            return
        if self._stops.matched is None:
            self._add_text(self._detokenizer.finish(self.token_ids[:-1] if self._hides_end else self.token_ids))
        if self._stops.matched is None:
            self._pieces.append(self._stops.finish())
        if self._stops.matched is not None and reason in ("stop", "length"):
            self._stop_reason, self.finish_reason = self._stops.matched, "stop"

    def further_ids(self, prefix: PrefixIds) -> bytes:
        """Ids of the units that its tokens have filled since the last call."""
        prompt, start = self.request.prompt_ids, self._num_units * prefix.unit
        output = np.array(self.token_ids[max(start - len(prompt), 0) :], np.int32)
        more = prefix.further(self._last_id, np.concatenate([prompt[start:], output]))
        self._num_units, self._last_id = self._num_units + len(more) // ID_BYTES, (self._last_id + more)[-ID_BYTES:]
        return more

    def output(self, *, is_delta: bool) -> CompletionOutput:
        """It as it is now, or what the last call did not return."""
        ids, first, reason = self.token_ids, self._reported[0] if is_delta else 0, self.finish_reason
        text = None if self._detokenizer is None else "".join(self._pieces)
        kept = [] if is_delta or text is None else [text]  # which the next one need not join again
        self._reported, self._pieces = (len(ids), reason is not None), kept  # an interrupt strikes between lines
        logprobs, total = (self._logprobs, self._cumulative_logprob) if self._has_logprobs else (None, None)
        self._logprobs = [] if is_delta else self._logprobs.copy()
        return CompletionOutput(self.index, text, ids[first:], reason, self._stop_reason, logprobs, total)

    def _add_text(self, piece: str) -> None:
        """Add text, up to a stop string; none is looked for in what came before ``min_tokens`` tokens were out."""
        if self._has_stops and len(self.token_ids) >= self.request.params.min_tokens:
            piece = self._stops.push(piece)
        if piece:
            self._pieces.append(piece)

    def _text_of(self, token_id: int) -> str | None:
        """Of a token in the place of the last; of those of one character, each U+FFFD, that which ends it has it."""
        if self.tokenizer is None:
            return None
        decode, before = partial(self.tokenizer.decode, goes_on=True, skip_special_tokens=False), self.token_ids[-4:-1]
        if "\ufffd" in (text := decode([token_id])):
            text = decode([*before, token_id]).rstrip("\ufffd")[len(decode(before).rstrip("\ufffd")) :].lstrip("\ufffd")
        return text
