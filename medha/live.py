"""A request between its admission to the engine and its last output: its tokens, its text, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from operator import attrgetter

from medha.admission import ModelLimits, PreparedRequest
from medha.errors import NonFiniteLogitsError
from medha.request import SLO, CompletionOutput, FinishReason, Logprob, RequestMetrics, RequestOutput
from medha.sampling import Sampled
from medha.text import Detokenizer, StopChecker, Tokenizer

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
    """A queued or running request and what it has produced.

    Args:
        request: what was asked for.
        slot: its handle in scheduler and runner.
        arrival_s: when it arrived, on the engine's clock.
        limits: of the model.
        tokenizer: for its text; None for none.
        sink: takes its outputs.

    Attributes:
        end_ids: end-of-sequence and stop ids; one of them ends it.
        finish_reason: why it has ended; None while it runs.
    """

    def __init__(
        self,
        request: PreparedRequest,
        slot: int,
        arrival_s: float,
        *,
        limits: ModelLimits,
        tokenizer: Tokenizer | None,
        sink: Callable[[RequestOutput], None],
    ) -> None:
        params, slo = request.params, request.slo
        self.request = request
        self.slot = slot
        self._eos_ids = frozenset(() if params.ignore_eos else limits.eos_token_ids)
        self.end_ids = self._eos_ids | frozenset(params.stop_token_ids or ())
        self.metrics = RequestMetrics(
            arrival_s,
            num_prompt_tokens=len(request.prompt_ids),
            ttft_slo_s=slo.ttft_s if slo else None,
            tpot_slo_s=slo.tpot_s if slo else None,
        )
        self.token_ids: list[int] = []
        self.finish_reason: FinishReason | None = None
        self._stop_reason: str | int | None = None
        self._error: Exception | None = None
        self._tokenizer = tokenizer
        self._sink = sink
        self._detokenizer: Detokenizer | None = None
        if tokenizer is not None and params.detokenize:
            self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=params.skip_special_tokens)
        self._stops = StopChecker(params.stop_strings, include_stop_str_in_output=params.include_stop_str_in_output)
        self._pieces: list[str] = []  # of the text, one or more a token
        self._logprobs: list[dict[int, Logprob]] = []
        self._cumulative_logprob = 0.0
        self._num_reported_tokens = 0
        self._num_reported_pieces = 0

    @property
    def request_id(self) -> str:
        """The id that the user gave."""
        return self.request.request_id

    @property
    def is_prefilling(self) -> bool:
        """Whether it has been scheduled and its first token is not out."""
        return self.metrics.first_scheduled is not None and not self.token_ids

    def take(self, sampled: Sampled, now_s: float) -> bool:
        """Append a sampled token; returns whether the request has ended with it."""
        if not sampled.finite:
            error = NonFiniteLogitsError(
                f"request {self.request_id!r}: the model returned NaN or infinite logits for token "
                f"{len(self.token_ids)}"
            )
            self.finish("error", now_s, error=error)
            return True
        params, token = self.request.params, sampled.token_id
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
        elif len(self.token_ids) >= params.max_tokens:
            self.finish("length", now_s)
        return self.finish_reason is not None

    def finish(
        self, reason: FinishReason, now_s: float, *, error: Exception | None = None, flush_text: bool = True
    ) -> None:
        """End the request; does nothing if it has ended before.

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
        self._error = error
        if self._detokenizer is None or not flush_text:
            return
        if self._stops.matched is None:
            self._add_text(self._detokenizer.finish())
        if self._stops.matched is None:
            self._pieces.append(self._stops.finish())
        if self._stops.matched is not None and reason in ("stop", "length"):
            self._stop_reason, self.finish_reason = self._stops.matched, "stop"

    def emit(self) -> None:
        """Hand out the request as it is now; with ``output_kind`` ``delta``, what was not handed out before."""
        self._sink(self._output())

    def _output(self) -> RequestOutput:
        params = self.request.params
        is_delta = params.output_kind == "delta"
        first, first_piece = (self._num_reported_tokens, self._num_reported_pieces) if is_delta else (0, 0)
        self._num_reported_tokens, self._num_reported_pieces = len(self.token_ids), len(self._pieces)
        completion = CompletionOutput(
            index=0,
            text=None if self._detokenizer is None else "".join(self._pieces[first_piece:]),
            token_ids=self.token_ids[first:],
            finish_reason=self.finish_reason,
            stop_reason=self._stop_reason,
            logprobs=None if params.logprobs is None else self._logprobs[first:],
            cumulative_logprob=None if params.logprobs is None else self._cumulative_logprob,
        )
        return RequestOutput(
            self.request_id,
            self.request.prompt,
            self.request.prompt_token_ids,
            [completion],
            self.finish_reason is not None,
            RequestMetrics(*_METRICS(self.metrics)),
            self._error,
        )

    def _add_text(self, piece: str) -> None:
        """Add text, up to a stop string; none is looked for in what came before ``min_tokens`` tokens were out."""
        if len(self.token_ids) >= self.request.params.min_tokens:
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
