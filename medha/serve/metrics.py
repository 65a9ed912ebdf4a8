"""What a server tells of its engine: ``/metrics`` for Prometheus, and what the status page draws.

Metrics have vLLM's names where they mean the same, so that its dashboards work, else ``medha:``. A counter or histogram
grows with each request that ends, or each batch; gauges are read from the engine when somebody asks. The page gets
lengths and times of the unfinished requests, nobody's text or name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from medha.batch import Batch
from medha.engine.engine import Engine
from medha.engine.request import Request
from medha.outputs import RequestMetrics, RequestOutput
from medha.sched.decision import Prediction
from medha.serve.service import Service

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1920, 7680)
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = tuple(sorted({factor * 10**power for power in range(8) for factor in (1, 2, 5)}))
_SLACK = (-100, -10, -3, -1, -0.3, 0, 0.3, 1, 3, 10, 100)
_RATIO = (0.5, 0.8, 0.9, 1, 1.1, 1.25, 2)
_LENGTHS = ((256, "1-256"), (4096, "256-4K"), (65536, "4K-64K"), (1 << 20, "64K-1M"))
PAGE = Path(__file__).with_name("page.html")  # says by a hash that its own script runs and no other; it loads nothing
EVENTS_S = 0.25  # between two events
_MOST_SHOWN = 256  # requests


def _less(value: float | None, part: float | None) -> float | None:
    return None if value is None or part is None else value - part


def _first_slack_s(its: RequestMetrics) -> float | None:
    """Seconds for which it could still have waited, had its first chunk, and been in time; None without a deadline."""
    if its.explanation is None or its.queue_time is None:
        return None
    return next((slack_s for at_s, slack_s in its.explanation.slack_s if at_s >= its.queue_time), None)


_OF_REQUESTS: Sequence[tuple[str, str, Sequence[float] | None, Callable[[RequestMetrics], float | None]]] = (
    ("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS, lambda m: m.ttft),
    ("vllm:request_time_per_output_token_seconds", "Mean time between tokens.", _TOKEN_SECONDS, lambda m: m.tpot),
    ("vllm:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS, lambda m: m.e2e),
    ("vllm:request_queue_time_seconds", "Arrival to first chunk.", _SECONDS, lambda m: m.queue_time),
    ("vllm:request_prefill_time_seconds", "First chunk to token.", _SECONDS, lambda m: _less(m.ttft, m.queue_time)),
    ("vllm:request_decode_time_seconds", "First token to last.", _SECONDS, lambda m: _less(m.e2e, m.ttft)),
    ("vllm:request_prompt_tokens", "Prompt tokens.", _TOKENS, lambda m: m.num_prompt_tokens),
    ("vllm:request_generation_tokens", "Tokens generated.", _TOKENS, lambda m: m.num_output_tokens),
    ("vllm:num_preemptions", "Requests that gave up their KV memory.", None, lambda m: m.num_preemptions),
    ("vllm:prefix_cache_queries", "Tokens looked up.", None, lambda m: m.num_prompt_tokens if m.num_chunks else 0),
    ("vllm:prefix_cache_hits", "Prompt tokens that others had computed.", None, lambda m: m.num_cached_tokens),
    ("medha:first_chunk_slack_seconds", "Slack at a request's first chunk.", _SLACK, _first_slack_s),
)  # fmt: skip
"""Of requests that have ended: name, help, buckets of a histogram or none of a counter, and what is noted, if any."""


class Metrics:
    """What a server tells Prometheus of an engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._now, self._by_slot = engine.now, engine.by_slot
        self.num_steps = 0  # batches that are done
        self._token_s: dict[int, float] = {}  # when the last token of a slot was
        self._model, registry = model, CollectorRegistry()
        self.text: Callable[[], bytes] = partial(generate_latest, registry)  # what ``/metrics`` shows

        def made(kind: Callable[..., Any], name: str, text: str, *labels: str, **options: Any) -> Any:
            found = kind(name, text, ["model_name", *labels], registry=registry, **options)
            return found if labels else found.labels(model)

        self._prompt_tokens = made(
            Counter, "vllm:prompt_tokens", "Prompt tokens read, cached ones too, with the first token of each."
        )
        self._tokens = made(Counter, "vllm:generation_tokens", "Tokens generated.")
        self._ended = made(Counter, "vllm:request_success", "Requests that have ended.", "finished_reason")
        self.ignored = made(Counter, "medha:request_fields_ignored", "Fields of requests that nobody knows.")
        self._missed = made(Counter, "medha:slo_miss", "Requests that missed an objective.", "bucket")
        self._gap = made(Histogram, "vllm:inter_token_latency_seconds", "Time between tokens.", buckets=_TOKEN_SECONDS)
        self._step = made(Histogram, "medha:step_time_seconds", "Busy seconds of a batch.", buckets=_TOKEN_SECONDS)
        self._error = made(Histogram, "medha:step_prediction_ratio", "Real over predicted seconds.", buckets=_RATIO)
        self._of_requests = [
            (made(Histogram, name, text, buckets=few).observe if few else made(Counter, name, text).inc, value)
            for name, text, few, value in _OF_REQUESTS
        ]
        share = "Share of KV memory in use, 0 to 1."
        running = made(Gauge, "vllm:num_requests_running", "Requests being served.")
        running.set_function(lambda: sum(one.num_running for one in engine.schedulers))
        waiting = made(Gauge, "vllm:num_requests_waiting", "Requests that have not started.")
        waiting.set_function(lambda: engine.scheduler.num_waiting)
        made(Gauge, "vllm:kv_cache_usage_perc", share).set_function(lambda: sum(_usage(engine)) / len(_usage(engine)))
        by_group = made(Gauge, "medha:kv_group_usage", share, "group")
        for group in range(len(_usage(engine))):
            by_group.labels(model, str(group)).set_function(partial(lambda at: _usage(engine)[at], group))
        engine.on_step = self.stepped

    def stepped(self, batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        """Note a batch that is done; the engine's thread calls it."""
        self.num_steps += 1
        self._step.observe(busy_s)
        now_s, sampled = self._now(), [self._by_slot[row.slot] for row in batch.rows if row.samples]
        sampling = [one for one in sampled if one.finish_reason is None]
        self._tokens.inc(len(sampling))
        self._prompt_tokens.inc(sum(len(one.request.prompt_ids) for one in sampling if not one.token_ids))
        for one in sampling:
            if one.token_ids:
                self._gap.observe(now_s - self._token_s[one.slot])
            self._token_s[one.slot] = now_s
        if prediction is not None and prediction.seconds > 0:
            self._error.observe(busy_s / prediction.seconds)

    def ended(self, request: Request, output: RequestOutput) -> None:
        """Note a request that has ended, with its last output, which as a delta need not have all completions."""
        metrics, length = output.metrics, output.metrics.num_prompt_tokens
        for one in request.completions:
            self._ended.labels(self._model, one.finish_reason or "abort").inc()
            for note, value in self._of_requests:
                if (found := value(one.metrics)) is not None:
                    note(found)
        if metrics.met_slo is False:
            self._missed.labels(self._model, next((name for most, name in _LENGTHS if length <= most), "1M-")).inc()


def snapshot(service: Service) -> dict[str, Any]:
    """The unfinished requests and the memory as they are now."""
    engine = service.engine
    now_s, requests = engine.now(), list(engine.live.values())
    rows = [_row(one, now_s, service.left_s(one.first)) for one in requests[:_MOST_SHOWN]]
    return {"now_s": now_s, "num_requests": len(requests), "requests": rows, "kv": _usage(engine)}


def _usage(engine: Engine) -> list[float]:
    """The share of its blocks that each group holds, 0 to 1; decode instances behind the others."""
    memories = [one.memory for one in engine.schedulers]
    return [its.used(group) / its.num_blocks for its in memories for group in range(its.num_groups)]


def _row(request: Request, now_s: float, left_s: float) -> dict[str, Any]:
    one, metrics = request.first, request.first.metrics
    due_s = None if metrics.deadline_s is None or one.token_ids else metrics.arrival + metrics.deadline_s
    return {
        "number": one.slot,
        "state": "answering" if one.token_ids else "waiting" if metrics.first_scheduled is None else "reading",
        "prompt_tokens": len(request.prompt_ids),
        "computed_tokens": one.num_computed_tokens,
        "output_tokens": sum(len(each.token_ids) for each in request.completions),
        "arrival_s": metrics.arrival,
        "first_scheduled_s": metrics.first_scheduled,
        "first_token_s": metrics.first_token,
        "slack_s": None if due_s is None else due_s - now_s - left_s,
    }
