"""A request between its admission to the engine and its last output: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter

from medha.engine.admission import ModelLimits, PreparedRequest
from medha.errors import NonFiniteLogitsError
from medha.outputs import CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from medha.params import SLO
from medha.text import Detokenizer, StopChecker, Tokenizer
from medha.worker.sampling import Sampled

# What of the completions' metrics is added up.
_SUMS = ("num_output_tokens", "num_chunks", "num_preemptions", "num_swaps", "work_lost_s")

# All fields as a tuple: a copy for every token that is handed out, and copy.copy takes several times as long.
_METRICS = attrgetter(*(field.name for field in fields(RequestMetrics)))


def refused_output(request: PreparedRequest, arrival_s: float, now_s: float, error: Exception) -> RequestOutput:
    """The output of a request that was not admitted."""
    slo = request.slo or SLO()
    metrics = RequestMetrics(
        arrival_s,
        finished=now_s,
        num_prompt_tokens=len(request.prompt_ids),
        ttft_slo_s=slo.ttft_s,
        tpot_slo_s=slo.tpot_s,
    )
    completion = CompletionOutput(0, text=None, token_ids=[], finish_reason="error")
    return RequestOutput(
        request.request_id, request.prompt, request.prompt_token_ids, [completion], True, metrics, error
    )


class LiveRequest:
    """A queued or running request.

    Args:
        request: what was asked for.
        slots: handles in scheduler and runner, one a completion.
        arrival_s: when it arrived, on the engine's clock.
        limits: of the model.
        tokenizer: for its text; None for none.
        sink: takes its outputs.

    Attributes:
        completions: what it has produced, by index.
    """

    def __init__(
        self,
        request: PreparedRequest,
        slots: Sequence[int],
        arrival_s: float,
        *,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        sink: Callable[[RequestOutput], None],
    ) -> None:
        self.request = request
        self.arrival_s = arrival_s
        self._sink = sink
        self.completions = tuple(
            Completion(self, index, slot, limits=limits, tokenizer=tokenizer) for index, slot in enumerate(slots)
        )

    @property
    def request_id(self) -> str:
        """The id that the user gave."""
        return self.request.request_id

    @property
    def first(self) -> Completion:
        """The completion with the first token, or that of index 0."""
        times = [completion.metrics.first_token for completion in self.completions]
        return self.completions[times.index(min((time for time in times if time is not None), default=None))]

    @property
    def has_ended(self) -> bool:
        """Whether all of its completions have."""
        return all(completion.finish_reason is not None for completion in self.completions)

    def emit(self) -> None:
        """Hand out the request as it is now; with ``output_kind`` ``delta``, what was not handed out before."""
        request, is_delta = self.request, self.request.params.output_kind == "delta"
        chosen = [c for c in self.completions if c.has_news] if is_delta else self.completions
        self._sink(
            RequestOutput(
                request.request_id,
                request.prompt,
                request.prompt_token_ids,
                [completion.output(is_delta=is_delta) for completion in chosen],
                self.has_ended,
                self._metrics(),
                next((c.error for c in self.completions if c.error is not None), None),
            )
        )

    def _metrics(self) -> RequestMetrics:
        """Of all completions together, a copy."""
        parts = [completion.metrics for completion in self.completions]
        total = RequestMetrics(*_METRICS(self.first.metrics))
        if len(parts) == 1:
            return total
        begun = [part.first_scheduled for part in parts if part.first_scheduled is not None]
        ends = [part.finished for part in parts if part.finished is not None]
        total.first_scheduled = min(begun, default=None)
        total.finished = max(ends) if len(ends) == len(parts) else None
        for name in _SUMS:
            setattr(total, name, sum(getattr(part, name) for part in parts))
        total.num_completions = len(parts)
        return total


class Completion:
    """One of the completions of a request: what it has produced, and when it ends.

    Args:
        live: the request.
        index: which one, from 0.
        slot: its handle in scheduler and runner.
        limits: of the model.
        tokenizer: for its text; None for none.

    Attributes:
        end_ids: end-of-sequence and stop ids; one of them ends it.
        finish_reason: why it has ended; None while it runs.
        error: what went wrong, where that is why.
    """

    def __init__(
        self, live: LiveRequest, index: int, slot: int, *, limits: ModelLimits, tokenizer: Tokenizer | None
    ) -> None:
        params, slo = live.request.params, live.request.slo
        self.live = live
        self.index = index
        self.slot = slot
        self._eos_ids = frozenset(() if params.ignore_eos else limits.eos_token_ids)
        self.end_ids = self._eos_ids | frozenset(params.stop_token_ids or ())
        self.metrics = RequestMetrics(
            live.arrival_s,
            num_prompt_tokens=len(live.request.prompt_ids),
            ttft_slo_s=slo.ttft_s if slo else None,
            tpot_slo_s=slo.tpot_s if slo else None,
        )
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self.error: Exception | None = None
        self._stop_reason: str | int | None = None
        self._tokenizer = tokenizer
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopChecker(params.stop_strings, include_stop_str_in_output=params.include_stop_str_in_output)
        self._pieces: list[str] = []  # of the text, one or more a token
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._reported: tuple[int, int, bool] = (0, 0, False)  # tokens, pieces, the end

    @property
    def name(self) -> str:
        """What people call it: the request's id, with the index where there are several."""
        is_one = self.live.request.params.n == 1
        return self.live.request_id if is_one else f"{self.live.request_id}[{self.index}]"

    def __str__(self) -> str:
        return (
            f"{self.name!r:.80} in slot {self.slot}: {self.metrics.num_prompt_tokens} prompt tokens, "
            f"{len(self.token_ids)} of {self.live.request.params.max_tokens} out, {self.metrics.num_chunks} chunks, "
            f"{self.metrics.num_preemptions} preemptions"
        )

    @property
    def is_prefilling(self) -> bool:
        """Whether it has been scheduled and its first token is not out."""
        return self.metrics.first_scheduled is not None and not self.token_ids

    @property
    def has_news(self) -> bool:
        """Whether :meth:`output` has something that it did not have when it was last called."""
        return self._reported != self._state

    @property
    def _state(self) -> tuple[int, int, bool]:
        return len(self.token_ids), len(self._pieces), self.finish_reason is not None

    def take(self, sampled: Sampled, now_s: float) -> bool:
        """Append a sampled token; returns whether this has ended with it."""
        if not sampled.finite:
            error = NonFiniteLogitsError(
                f"request {self.name!r}: the model returned NaN or infinite logits for token {len(self.token_ids)}"
            )
            self.finish("error", now_s, error=error)
            return True
        params, token = self.live.request.params, sampled.token_id
        self.token_ids.append(token)
        self.metrics.num_output_tokens += 1
        if self.metrics.first_token is None:
            self.metrics.first_token = now_s
        if sampled.logprobs is not None:
            self._take_logprobs(sampled.logprobs)
        ends = token in self.end_ids
        if self._detokenizer is not None and (not ends or params.include_stop_str_in_output):
            self._add_text(self._detokenizer.push(token))
        if ends or self._stops.matched is not None:
            self._stop_reason = self._stops.matched or (None if token in self._eos_ids else token)
            self.finish("stop", now_s)
        elif len(self.token_ids) >= self.live.request.max_tokens:
            self.finish("length", now_s)
        return self.finish_reason is not None

    def finish(
        self, reason: FinishReason, now_s: float, *, error: Exception | None = None, flush_text: bool = True
    ) -> None:
        """End it; does nothing if it has ended before.

        Args:
            reason: why.
            now_s: time.
            error: what went wrong, with reason ``error``.
            flush_text: whether to add text held back for the next token; it may complete a stop string.
        """
        if self.finish_reason is not None:
            return
        self.finish_reason = reason
        self.metrics.finished = now_s
        self.error = error
        if self._detokenizer is None or not flush_text:
            return
        if self._stops.matched is None:
            self._add_text(self._detokenizer.finish())
        if self._stops.matched is None:
            self._pieces.append(self._stops.finish())
        if self._stops.matched is not None and reason in ("stop", "length"):
            self._stop_reason, self.finish_reason = self._stops.matched, "stop"

    def output(self, *, is_delta: bool) -> CompletionOutput:
        """It as it is now, or what the last call did not return."""
        first, first_piece, _ = self._reported if is_delta else (0, 0, False)
        self._reported = self._state
        has_logprobs = self.live.request.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=None if self._detokenizer is None else "".join(self._pieces[first_piece:]),
            token_ids=self.token_ids[first:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=self._logprobs[first:] if has_logprobs else None,
            cumulative_logprob=self._cumulative_logprob if has_logprobs else None,
        )

    def _add_text(self, piece: str) -> None:
        """Add text, up to a stop string; none is looked for in what came before ``min_tokens`` tokens were out."""
        if len(self.token_ids) >= self.live.request.params.min_tokens:
            piece, _ = self._stops.push(piece)
        self._pieces.append(piece)

    def _take_logprobs(self, logprobs: Sequence[tuple[int, float, int]]) -> None:
        """Add what was asked for of one token: the drawn one, then the likeliest."""
        self._logprobs.append({i: Logprob(value, rank, self._token_text(i)) for i, value, rank in logprobs})
        self._cumulative_logprob += logprobs[0][1]

    def _token_text(self, token_id: int) -> str | None:
        if self._tokenizer is None:
            return None
        return self._tokenizer.decode([token_id], skip_special_tokens=False)
