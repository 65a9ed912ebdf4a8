"""The status page and what it draws: lengths and times of the unfinished requests, nobody's text or name."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec

from medha.engine.request import Request
from medha.serve.service import Service

PAGE = Path(__file__).with_name("page.html")
"""It says itself, by a hash, that its own script runs and no other; it loads nothing."""

EVENTS_S = 0.25
"""Between two events."""

_MOST_SHOWN = 256  # requests


class Snapshots:
    """What the page draws of a server, made once for all who look."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._model = model
        self._made_s, self._last = -math.inf, b""

    def event(self) -> bytes:
        """The unfinished requests and the memory as they are now, as JSON."""
        engine = self._service.engine
        now_s = engine.now()
        if now_s - self._made_s >= EVENTS_S:
            requests, kv = engine.requests(), engine.scheduler.memory.usage
            rows = [self._row(one, now_s) for one in requests[:_MOST_SHOWN] if one.completions]
            now = {"model": self._model, "now_s": now_s, "num_requests": len(requests), "requests": rows, "kv": kv}
            self._made_s, self._last = now_s, msgspec.json.encode(now)
        return self._last

    def _row(self, request: Request, now_s: float) -> dict[str, Any]:
        one, metrics = request.first, request.first.metrics
        due_s = None if metrics.deadline_s is None or one.token_ids else metrics.arrival + metrics.deadline_s
        return {
            "number": one.slot,
            "state": "answering" if one.token_ids else "waiting" if metrics.first_scheduled is None else "reading",
            "priority": request.priority,
            "prompt_tokens": len(request.prompt_ids),
            "computed_tokens": one.num_computed_tokens,
            "output_tokens": sum(len(each.token_ids) for each in request.completions),
            "arrival_s": metrics.arrival,
            "first_scheduled_s": metrics.first_scheduled,
            "first_token_s": metrics.first_token,
            "slack_s": None if due_s is None else due_s - now_s - self._service.left_s(one),
        }
