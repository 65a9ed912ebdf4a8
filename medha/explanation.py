"""Where a request's time to first token went, as plain data; :mod:`medha.sched.ledger` makes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Explanation:
    """Where the seconds from a request's arrival to its first token went, or up to the last tick while it has none.

    Attributes:
        request_id: of the request; ``slot N`` where the ledger was told none, also in ``others``.
        has_first_token: whether ``total_s`` is the TTFT.
        total_s: sum of the parts.
        own_s: computing its own chunks.
        decodes_s: decodes.
        others_s: chunks of other requests.
        others: (request id, seconds) of those with the largest part in ``others_s``, as far back as chunks are kept.
        memory_s: waiting for KV memory.
        pipeline_s: in flight beyond the busy time of its group.
        idle_s: nothing was in flight.
        slack_s: (seconds since arrival, seconds for which it could still wait and be in time), some samples; empty
            without a deadline.
    """

    request_id: str
    has_first_token: bool
    total_s: float
    own_s: float
    decodes_s: float
    others_s: float
    others: tuple[tuple[str, float], ...]
    memory_s: float
    pipeline_s: float
    idle_s: float
    slack_s: tuple[tuple[float, float], ...]

    @property
    def parts_s(self) -> dict[str, float]:
        """The parts by name: ``own``, ``decodes``, ``others``, ``memory``, ``pipeline``, ``idle``."""
        return {
            "own": self.own_s,
            "decodes": self.decodes_s,
            "others": self.others_s,
            "memory": self.memory_s,
            "pipeline": self.pipeline_s,
            "idle": self.idle_s,
        }

    def text(self, name: Callable[[str], str] = str) -> str:
        """A few lines for a person; ``name`` says how a request id is shown."""
        what = "TTFT" if self.has_first_token else "no first token after"
        top = [f"{name(request_id)} {seconds:.3f}" for request_id, seconds in self.others]
        lines = [
            f"{name(self.request_id)}: {what} {self.total_s:.3f} s",
            f"  own compute {self.own_s:.3f}, decodes {self.decodes_s:.3f}, other prefills {self.others_s:.3f}"
            + (f" ({', '.join(top)})" if top else ""),
            f"  memory {self.memory_s:.3f}, pipeline {self.pipeline_s:.3f}, idle {self.idle_s:.3f}",
        ]
        if self.slack_s:
            samples = ", ".join(f"{slack_s:+.3f} at {at_s:.3f}" for at_s, slack_s in self.slack_s)
            lines.append(f"  slack {samples}")
        return "\n".join(lines)

    @classmethod
    def from_json(cls, fields: Mapping[str, Any]) -> Explanation:
        """The inverse of :func:`dataclasses.asdict` after JSON has made lists of its tuples."""
        pairs = {name: tuple(map(tuple, fields[name])) for name in ("others", "slack_s")}
        return cls(**{**fields, **pairs})
