"""``/metrics`` for Prometheus: vLLM's names where they mean the same, so that its dashboards work, else ``medha:``.

A counter or histogram grows with each request that ends, or each batch; gauges are read from the engine when somebody
asks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from medha.batch import Batch
from medha.engine.engine import Engine
from medha.engine.request import Request
from medha.outputs import RequestOutput
from medha.sched.decision import Prediction

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1, 2.5, 5, 10, 20, 40, 80, 160, 320, 640, 1920, 7680)
_TOKEN_SECONDS = (0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2.5, 5)
_TOKENS = tuple(sorted({factor * 10**power for power in range(8) for factor in (1, 2, 5)}))
_SLACK = (-100, -10, -3, -1, -0.3, 0, 0.3, 1, 3, 10, 100)
_BUCKETS = ((256, "1-256"), (4096, "256-4K"), (65536, "4K-64K"), (1 << 20, "64K-1M"))


class Metrics:
    """What a server tells Prometheus of an engine."""

    def __init__(self, engine: Engine, model: str) -> None:
        self._now = engine.now
        self._token_s: dict[int, float] = {}  # when the last token of a slot was
        self._registry = CollectorRegistry()
        self._model = model

        def histogram(name: str, text: str, buckets: Iterable[float]) -> Histogram:
            found = Histogram(name, text, ["model_name"], buckets=tuple(buckets), registry=self._registry)
            return found.labels(model)

        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(name, text, ["model_name", *labels], registry=self._registry)

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(name, text, ["model_name"], registry=self._registry).labels(model).set_function(value)

        def share_of(group: int) -> float:
            return kv.usage[group]

        self._prompt_tokens = counter("vllm:prompt_tokens", "Prompt tokens read, cached ones too.").labels(model)
        self._queries = counter("vllm:prefix_cache_queries", "Prompt tokens that were looked up.").labels(model)
        self._hits = counter("vllm:prefix_cache_hits", "Prompt tokens that others had computed.").labels(model)
        self._tokens = counter("vllm:generation_tokens", "Tokens generated.").labels(model)
        self._ended = counter("vllm:request_success", "Requests that have ended.", "finished_reason")
        self._preemptions = counter("vllm:num_preemptions", "Requests that gave up their KV memory.").labels(model)
        self._ttft = histogram("vllm:time_to_first_token_seconds", "Arrival to first token.", _SECONDS)
        self._gap = histogram("vllm:inter_token_latency_seconds", "Time between two tokens.", _TOKEN_SECONDS)
        self._tpot = histogram(
            "vllm:request_time_per_output_token_seconds", "Mean time between tokens.", _TOKEN_SECONDS
        )
        self._e2e = histogram("vllm:e2e_request_latency_seconds", "Arrival to last token.", _SECONDS)
        self._queue = histogram("vllm:request_queue_time_seconds", "Arrival to first chunk.", _SECONDS)
        self._prefill = histogram("vllm:request_prefill_time_seconds", "First chunk to first token.", _SECONDS)
        self._decode = histogram("vllm:request_decode_time_seconds", "First token to last.", _SECONDS)
        self._prompt = histogram("vllm:request_prompt_tokens", "Prompt tokens.", _TOKENS)
        self._output = histogram("vllm:request_generation_tokens", "Tokens generated.", _TOKENS)
        self.ignored = counter("medha:request_fields_ignored", "Fields of requests that nobody knows.").labels(model)
        self._missed = counter("medha:slo_miss", "Requests that missed an objective.", "bucket")
        self._step = histogram("medha:step_time_seconds", "Busy seconds of a batch.", _TOKEN_SECONDS)
        self._error = histogram(
            "medha:step_prediction_ratio", "Real over predicted seconds.", (0.5, 0.8, 0.9, 1, 1.1, 1.25, 2)
        )
        self._slack = histogram("medha:first_chunk_slack_seconds", "Slack at a request's first chunk.", _SLACK)
        scheduler, kv, share = engine.scheduler, engine.scheduler.memory, "Share of KV memory in use, 0 to 1."
        gauge("vllm:num_requests_running", "Requests being served.", lambda: scheduler.num_running)
        gauge("vllm:num_requests_waiting", "Requests that have not started.", lambda: scheduler.num_waiting)
        gauge("vllm:kv_cache_usage_perc", share, lambda: sum(kv.usage) / kv.num_groups)
        by_group = Gauge("medha:kv_group_usage", share, ["model_name", "group"], registry=self._registry)
        for group in range(kv.num_groups):
            by_group.labels(model, str(group)).set_function(partial(share_of, group))
        engine.on_step = self.stepped

    def stepped(self, batch: Batch, prediction: Prediction | None, busy_s: float) -> None:
        """Note a batch that is done; the engine's thread calls it."""
        self._step.observe(busy_s)
        self._prompt_tokens.inc(batch.num_tokens - batch.num_decodes + sum(one.num_tokens for one in batch.shared))
        self._tokens.inc(sum(row.samples for row in batch.rows))
        now_s = self._now()
        for row in batch.rows:
            if row.samples:
                if row.is_decode:
                    self._gap.observe(now_s - self._token_s[row.slot])
                self._token_s[row.slot] = now_s
        if prediction is not None and prediction.seconds > 0:
            self._error.observe(busy_s / prediction.seconds)

    def ended(self, request: Request, output: RequestOutput) -> None:
        """Note a request that has ended, with its last output, which as a delta need not have all completions."""
        metrics, model = output.metrics, self._model
        self._preemptions.inc(metrics.num_preemptions)
        for one in request.completions:
            self._ended.labels(model, one.finish_reason or "abort").inc()
        if metrics.met_slo is False:
            length = metrics.num_prompt_tokens
            self._missed.labels(model, next((name for most, name in _BUCKETS if length <= most), "1M-")).inc()
        ttft, queue_s, e2e = metrics.ttft, metrics.queue_time, metrics.e2e
        for times, value in (
            (self._prefill, None if ttft is None or queue_s is None else ttft - queue_s),
            (self._decode, None if ttft is None or e2e is None else e2e - ttft),
            (self._ttft, ttft),
            (self._tpot, metrics.tpot),
            (self._e2e, e2e),
            (self._queue, queue_s),
            (self._slack, _first_slack_s(output)),
        ):
            if value is not None:
                times.observe(value)
        if metrics.first_scheduled is not None:
            self._queries.inc(metrics.num_prompt_tokens)
            self._hits.inc(output.num_cached_tokens)
        self._prompt.observe(metrics.num_prompt_tokens)
        self._output.observe(metrics.num_output_tokens)

    def text(self) -> bytes:
        """The page."""
        return generate_latest(self._registry)


def _first_slack_s(output: RequestOutput) -> float | None:
    """Seconds for which it could still have waited, had its first chunk, and been in time; None without a deadline."""
    explanation, metrics = output.metrics.explanation, output.metrics
    if explanation is None or metrics.queue_time is None:
        return None
    later = [slack_s for at_s, slack_s in explanation.slack_s if at_s >= metrics.queue_time]
    return later[0] if later else None
