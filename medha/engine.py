"""The loop: requests in, batches through scheduler and runner, outputs back.

:class:`Engine` is for those who drive the loop themselves (``add_request``, ``abort``, ``step``);
:class:`medha.LLM` wraps it. The engine decides when a request ends (end ids, stop strings, lengths); the scheduler
decides what runs; the runner computes. A step is: fill the pipeline to its depth, then complete the oldest batch.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from medha.batch import Batch
from medha.errors import (
    ChatTemplateError,
    ContextLengthError,
    EngineDeadError,
    KVCapacityError,
    NonFiniteLogitsError,
    TokenizerError,
    ValidationError,
)
from medha.request import (
    SLO,
    CompletionOutput,
    FinishReason,
    Logprob,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
)
from medha.runner import Runner, StepResult
from medha.sampling import Sampled
from medha.sched.scheduler import RequestHead, Scheduler
from medha.text import Detokenizer, StopChecker, Tokenizer
from medha.timeline import Timeline

logger = logging.getLogger("medha")

Prompt = str | Sequence[int] | Mapping[str, Any]
"""Text, token ids, or a mapping with exactly one of ``prompt``, ``prompt_token_ids``, ``messages``."""


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a request is checked against.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: prompt plus output in tokens.
        eos_token_ids: ids that end a sequence.
        sampling_defaults: from ``generation_config.json``, by field of :class:`SamplingParams`.
        seed: base of the seeds of requests that bring none.
    """

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    sampling_defaults: Mapping[str, float | int | None] = field(default_factory=dict)
    seed: int = 0


@dataclass(slots=True)
class PreparedRequest:
    """A request that has been tokenised and checked, not yet queued."""

    request_id: str
    prompt: str | None
    prompt_ids: list[int]
    params: SamplingParams
    slo: SLO | None


@dataclass(slots=True)
class _Live:
    """A queued or running request and what it has produced."""

    request: PreparedRequest
    slot: int
    end_ids: frozenset[int]
    stop_ids: frozenset[int]
    metrics: RequestMetrics
    detokenizer: Detokenizer | None
    stops: StopChecker
    token_ids: list[int] = field(default_factory=list)
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    num_reported: int = 0
    num_text_reported: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: Exception | None = None


class Engine:
    """Continuous batching on one model.

    Args:
        runner: runs batches.
        scheduler: decides them.
        limits: what requests are checked against.
        tokenizer: None serves token ids alone, with ``text`` None.
        clock: monotonic seconds; the engine's time starts at 0.
        timeline: records what ran when, if given.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        limits: ModelLimits,
        *,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
        timeline: Timeline | None = None,
    ) -> None:
        self.runner = runner
        self.scheduler = scheduler
        self.limits = limits
        self.tokenizer = tokenizer
        self.timeline = timeline
        self._clock = clock
        self._start = clock()
        self._live: dict[str, _Live] = {}
        self._by_slot: dict[int, _Live] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        self._num_added = 0
        self._in_flight: deque[tuple[Batch, StepResult]] = deque()
        self._ended: list[RequestOutput] = []
        self._dead: EngineDeadError | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    @property
    def has_unfinished(self) -> bool:
        """Whether any request still has something to return from :meth:`step`."""
        return bool(self._live or self._ended or self._in_flight)

    @property
    def num_unfinished(self) -> int:
        """Requests queued or running."""
        return len(self._live)

    def prefills(self, *, min_tokens: int = 1) -> list[tuple[str, int, int]]:
        """(request id, prompt tokens computed, prompt tokens) of admitted prompts of at least ``min_tokens``."""
        found = []
        for live in self._live.values():
            total, slot = len(live.request.prompt_ids), live.slot
            if total >= min_tokens and live.metrics.first_scheduled is not None and not live.token_ids:
                found.append((live.request.request_id, self.scheduler.num_computed_tokens(slot), total))
        return found

    def now(self) -> float:
        """Seconds since the engine was made, the clock of all metrics."""
        return self._clock() - self._start

    def add_request(
        self,
        request_id: str,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        arrival_s: float | None = None,
    ) -> None:
        """Check, tokenise and queue one request.

        Args:
            request_id: unique among unfinished requests.
            prompt: text, token ids, or a mapping with ``prompt``, ``prompt_token_ids`` or ``messages``.
            params: sampling parameters.
            slo: its objectives.
            arrival_s: when it arrived on the engine's clock (:meth:`now`); now by default.

        Raises:
            ValidationError, ContextLengthError, KVCapacityError: the request is wrong; nothing was queued.
            UnsupportedFeatureError: it asks for something medha does not have.
            EngineDeadError: the engine has failed before.
        """
        arrival_s = self.now() if arrival_s is None else arrival_s
        self.add_prepared(self.prepare(request_id, prompt, params, slo=slo), arrival_s=arrival_s)

    def prepare(
        self, request_id: str, prompt: Prompt, params: SamplingParams | None = None, *, slo: SLO | None = None
    ) -> PreparedRequest:
        """Tokenise and check a request without queueing it; raises as :meth:`add_request`."""
        if not isinstance(request_id, str) or not request_id:
            raise ValidationError(
                f"request_id={request_id!r}; accepted: a string", param="request_id", value=request_id
            )
        if params is not None and not isinstance(params, SamplingParams):
            raise ValidationError(
                f"sampling_params={params!r}; accepted: SamplingParams", param="sampling_params", value=params
            )
        if slo is not None and not isinstance(slo, SLO):
            raise ValidationError(f"slo={slo!r}; accepted: SLO", param="slo", value=slo)
        text, ids = self._tokenise(prompt)
        params = (params or SamplingParams()).resolve(self.limits.sampling_defaults)
        self._check_tokenizer(params)
        self._check_ids(params.stop_token_ids or (), "stop_token_ids")
        return PreparedRequest(request_id, text, ids, self._fit(ids, params), slo)

    def add_prepared(self, request: PreparedRequest, *, arrival_s: float) -> None:
        """Queue a request that :meth:`prepare` returned; raises on a duplicate id or a dead engine."""
        if self._dead is not None:
            raise self._dead
        if request.request_id in self._live:
            raise ValidationError(
                f"request_id={request.request_id!r} is in flight already; accepted: an id not in use",
                param="request_id",
                value=request.request_id,
            )
        params = request.params
        live = _Live(
            request,
            slot=self._take_slot(),
            end_ids=frozenset(() if params.ignore_eos else self.limits.eos_token_ids),
            stop_ids=frozenset(params.stop_token_ids or ()),
            metrics=RequestMetrics(
                arrival_s,
                num_prompt_tokens=len(request.prompt_ids),
                ttft_slo_s=request.slo.ttft_s if request.slo else None,
                tpot_slo_s=request.slo.tpot_s if request.slo else None,
            ),
            detokenizer=(
                Detokenizer(self.tokenizer, skip_special_tokens=params.skip_special_tokens)
                if self.tokenizer is not None and params.detokenize
                else None
            ),
            stops=StopChecker(params.stop_strings, include_stop_str_in_output=params.include_stop_str_in_output),
        )
        seed = params.seed if params.seed is not None else self.limits.seed * 1_000_003 + self._num_added
        self._num_added += 1
        end_ids = tuple(sorted(live.end_ids | live.stop_ids))
        self.runner.open(live.slot, request.prompt_ids, params, seed=seed, end_ids=end_ids)
        self.scheduler.add(RequestHead(live.slot, len(request.prompt_ids), params.max_tokens, arrival_s, request.slo))
        self._live[request.request_id] = live
        self._by_slot[live.slot] = live

    def abort(self, request_id: str) -> None:
        """End a request now, keeping what it has produced; the next :meth:`step` returns it. No-op if unknown."""
        live = self._live.get(request_id)
        if live is not None:
            self._end(live, "abort")
            self._release(self.scheduler.cancel(live.slot))

    # -- the loop ------------------------------------------------------------------------------------------------

    def step(self) -> list[RequestOutput]:
        """Fill the pipeline, complete its oldest batch, and return the outputs that changed.

        A request that is not finished is returned as its ``output_kind`` says; a finished one once, whole (with
        ``delta``: what had not been returned yet). Returns an empty list when there is nothing to do.

        Raises:
            EngineDeadError: a step failed; every unfinished request has ended with that error, and the exception's
                ``outputs`` holds them.
        """
        if self._dead is not None:
            raise self._dead
        try:
            updated = self._step()
        except Exception as error:
            self._die(error)
            raise self._dead from error  # type: ignore[misc]
        except BaseException:
            self.abandon()
            raise
        ended, self._ended = self._ended, []
        return [self._snapshot(live) for live in updated if live.finish_reason is None] + ended

    def abandon(self) -> None:
        """Abort everything and forget what is in flight; the next :meth:`step` returns the aborted requests."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._in_flight.clear()
        for batch in self.scheduler.in_flight:
            self._release(self.scheduler.complete(batch.batch_id, self.now(), [], 0.0))
        self.runner.reset()

    def _step(self) -> list[_Live]:
        """One step; returns the requests that got a token and want to be heard before their end."""
        while True:
            start = self.now()
            batch = self.scheduler.schedule(start)
            if batch is None:
                break
            self._note_chunks(batch, start)
            result = self.runner.run(batch)
            if self.timeline is not None:
                self.timeline.record(batch, start, self.now(), self._request_id)
            self._in_flight.append((batch, result))
        if not self._in_flight:
            return []
        batch, result = self._in_flight.popleft()
        now = self.now()
        results, updated = [], []
        for row, sampled in zip(result.rows, result.sampled, strict=True):
            live = self._by_slot.get(row.slot)
            if live is None or live.finish_reason is not None:
                continue  # aborted while in flight: the result is dropped
            self._take_token(live, sampled, now)
            results.append((row.slot, 1, live.finish_reason is not None))
            if live.request.params.output_kind != "final_only":
                updated.append(live)
        self._release(self.scheduler.complete(batch.batch_id, now, results, result.busy_s))
        return updated

    def _note_chunks(self, batch: Batch, now: float) -> None:
        for row in batch.rows:
            metrics = self._by_slot[row.slot].metrics
            if metrics.first_scheduled is None:
                metrics.first_scheduled = now
            metrics.num_chunks += not row.is_decode

    def _take_token(self, live: _Live, sampled: Sampled, now: float) -> None:
        """Append a token to a request and end it if this was its last."""
        if not sampled.finite:
            live.error = NonFiniteLogitsError(
                f"request {live.request.request_id!r}: the model returned NaN or infinite logits for token "
                f"{len(live.token_ids)}"
            )
            self._end(live, "error", now)
            return
        params, token = live.request.params, sampled.token_id
        live.token_ids.append(token)
        live.metrics.num_output_tokens += 1
        if live.metrics.first_token is None:
            live.metrics.first_token = now
        if sampled.logprobs is not None:
            live.logprobs.append({i: Logprob(value, rank, self._token_text(i)) for i, value, rank in sampled.logprobs})
        if token in live.end_ids or token in live.stop_ids:
            live.stop_reason = None if token in live.end_ids else token
            if params.include_stop_str_in_output:
                self._take_text(live, token)
            self._end(live, "stop", now)
            return
        live.stop_reason = self._take_text(live, token)
        if live.stop_reason is not None:
            self._end(live, "stop", now)
        elif len(live.token_ids) >= params.max_tokens:
            self._end(live, "length", now)

    def _take_text(self, live: _Live, token: int) -> str | None:
        """Add a token's text; returns the stop string it completed, if any."""
        if live.detokenizer is None:
            return None
        piece = live.detokenizer.push(token)
        if len(live.token_ids) < live.request.params.min_tokens:
            live.text.append(piece)
            return None
        safe, stop = live.stops.push(piece)
        live.text.append(safe)
        return stop

    def _end(self, live: _Live, reason: FinishReason, now: float | None = None) -> None:
        """Finish a request: flush its text, stamp it, and put its output among those to return."""
        if live.finish_reason is not None:
            return
        live.finish_reason = reason
        live.metrics.finished = self.now() if now is None else now
        if live.detokenizer is not None and not isinstance(live.stop_reason, str):
            self._flush_text(live)
        self._ended.append(self._snapshot(live))
        del self._live[live.request.request_id]

    def _flush_text(self, live: _Live) -> None:
        """Add the text still held back; it may complete a stop string."""
        assert live.detokenizer is not None
        safe, stop = live.stops.push(live.detokenizer.finish())
        live.text.append(safe)
        if stop is None:
            live.text.append(live.stops.finish())
            stop = live.stops.matched
        if stop is not None and live.finish_reason in ("stop", "length"):
            live.stop_reason, live.finish_reason = stop, "stop"

    def _snapshot(self, live: _Live) -> RequestOutput:
        """The request's output now; with ``delta``, what has not been returned yet."""
        request, delta = live.request, live.request.params.output_kind == "delta"
        first, first_text = (live.num_reported, live.num_text_reported) if delta else (0, 0)
        live.num_reported, live.num_text_reported = len(live.token_ids), len(live.text)
        wants_logprobs = request.params.logprobs is not None
        logprobs = live.logprobs[first:] if wants_logprobs else None
        cumulative = (
            sum(entry[token].logprob for entry, token in zip(live.logprobs, live.token_ids, strict=False))
            if wants_logprobs
            else None
        )
        completion = CompletionOutput(
            index=0,
            text=None if live.detokenizer is None else "".join(live.text[first_text:]),
            token_ids=live.token_ids[first:],
            finish_reason=live.finish_reason,
            stop_reason=live.stop_reason,
            logprobs=logprobs,
            cumulative_logprob=cumulative,
        )
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_ids,
            [completion],
            live.finish_reason is not None,
            live.metrics,
            live.error,
        )

    # -- slots and failure ---------------------------------------------------------------------------------------

    def _take_slot(self) -> int:
        if self._free_slots:
            return self._free_slots.pop()
        self._num_slots += 1
        return self._num_slots - 1

    def _release(self, closed: Sequence[int]) -> None:
        for slot in closed:
            self.runner.close(slot)
            del self._by_slot[slot]
            self._free_slots.append(slot)

    def _die(self, cause: Exception) -> None:
        """End every request with the error that stopped the engine."""
        self._dead = EngineDeadError(f"a step failed: {type(cause).__name__}: {cause}")
        self._dead.__cause__ = cause
        for live in list(self._live.values()):
            live.error = self._dead
            self._end(live, "error")
        self._dead.outputs = self._ended

    def _request_id(self, slot: int) -> str:
        return self._by_slot[slot].request.request_id

    def _token_text(self, token_id: int) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    # -- checks --------------------------------------------------------------------------------------------------

    def _tokenise(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """(text or None, ids) of a prompt in any of its forms."""
        if isinstance(prompt, Mapping):
            forms = [key for key in ("prompt", "prompt_token_ids", "messages") if prompt.get(key) is not None]
            if len(forms) != 1:
                raise ValidationError(
                    f"a prompt mapping has {forms or 'none'} of prompt, prompt_token_ids, messages; accepted: one",
                    param="prompt",
                    value=prompt,
                )
            value = prompt[forms[0]]
            if forms[0] == "messages":
                return self._tokenise_chat(value)
            if (forms[0] == "prompt") != isinstance(value, str):
                accepted = "text" if forms[0] == "prompt" else "a list of token ids"
                raise ValidationError(f"{forms[0]}={value!r:.80}; accepted: {accepted}", param=forms[0], value=value)
            return self._tokenise(value)
        if isinstance(prompt, str):
            if not prompt:
                raise ValidationError("the prompt is empty; accepted: at least one token", param="prompt", value="")
            if self.tokenizer is None:
                raise ValidationError(
                    "the model folder has no tokenizer.json, so text cannot be encoded; give prompt_token_ids",
                    param="prompt",
                    value=prompt,
                )
            return prompt, self._nonempty(self.tokenizer.encode(prompt))
        if isinstance(prompt, (bytes, bytearray)) or not isinstance(prompt, Sequence):
            try:
                prompt = list(prompt.tolist())  # type: ignore[union-attr]
            except AttributeError:
                raise ValidationError(
                    f"prompt of type {type(prompt).__name__}; accepted: text, token ids, or a mapping",
                    param="prompt",
                    value=prompt,
                ) from None
        self._check_ids(prompt, "prompt_token_ids")
        return None, self._nonempty(list(prompt))

    def _tokenise_chat(self, messages: Any) -> tuple[str | None, list[int]]:
        if self.tokenizer is None:
            raise ValidationError(
                "the model folder has no tokenizer.json, so messages cannot be encoded; give prompt_token_ids",
                param="messages",
                value=messages,
            )
        try:
            return None, self._nonempty(self.tokenizer.encode_chat(messages))
        except (ChatTemplateError, TokenizerError) as error:
            raise ValidationError(str(error), param="messages", value=messages) from error

    def _nonempty(self, ids: list[int]) -> list[int]:
        if not ids:
            raise ValidationError("the prompt has no token; accepted: at least one", param="prompt", value=ids)
        return ids

    def _check_ids(self, ids: Sequence[Any], param: str) -> None:
        """Every id is an int in the vocabulary; names the first that is not."""
        vocab = self.limits.vocab_size
        for i, token in enumerate(ids):
            if type(token) is not int or not 0 <= token < vocab:
                raise ValidationError(
                    f"{param}[{i}]={token!r:.80}; accepted: integers from 0 to {vocab - 1}", param=param, value=token
                )

    def _check_tokenizer(self, params: SamplingParams) -> None:
        if params.stop_strings and self.tokenizer is None:
            raise ValidationError(
                f"stop={params.stop!r} needs text, and the model folder has no tokenizer.json; use stop_token_ids",
                param="stop",
                value=params.stop,
            )

    def _fit(self, ids: list[int], params: SamplingParams) -> SamplingParams:
        """``params`` with ``max_tokens`` capped to the room that the prompt leaves."""
        room = self.limits.max_model_len - len(ids)
        if room < 1:
            raise ContextLengthError(
                f"the prompt has {len(ids)} tokens and max_model_len is {self.limits.max_model_len}; "
                f"accepted: at most {self.limits.max_model_len - 1}",
                param="prompt",
                value=len(ids),
            )
        if params.max_tokens > room:
            logger.info("max_tokens=%d is capped to %d, the room after the prompt", params.max_tokens, room)
            params = params.capped(room)
        needed = self.scheduler.claim_blocks(len(ids), params.max_tokens)
        pool = self.scheduler.pool.num_blocks
        if needed > pool:
            raise KVCapacityError(
                f"{len(ids)} prompt tokens and max_tokens={params.max_tokens} need {needed} KV blocks of "
                f"{self.scheduler.block_size} tokens; the pool has {pool} ({pool * self.scheduler.block_size} tokens)",
                param="max_tokens",
                value=params.max_tokens,
            )
        return params
