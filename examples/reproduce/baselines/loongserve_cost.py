"""What a prefill, a decode step and a migration take with elastic sequence parallelism, and the fit its manager uses.

Source: LoongServe (Wu et al., arXiv:2404.09526). A prefill of a batch on ``degree`` instances is that of a striped ring
(:mod:`examples.reproduce.baselines.context_parallel`), with the attention of each request added up. The manager does
not decide by it but by ``alpha + beta * sum(n) + gamma * sum(n^2)``, as LoongServe's does. The three are fitted for
each degree when a play begins, by relative error. On A100s with TP 2 that is within 2 % in a node.
Between nodes, where a part of the transfers is hidden in long prompts alone, it is up to 12 % too much at 128K and
18 % too little at 1M.

Where this is simpler than the system, it is kinder to it: a ring lies in as few nodes as could hold it, moved keys and
values always go at the rate within a node, launches of the requests of a batch are shared, and a decode step on several
instances pays for the way back of partial results alone, as if the way there were hidden.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from examples.reproduce.baselines.context_parallel import ContextParallel, link_of, prefill_s
from medha.config import ModelConfig, ParallelConfig, SchedulerConfig
from medha.cost.chunk_times import relative_fit
from medha.cost.hardware import HardwareSpec
from medha.cost.predictor import Decodes, Predictor
from medha.cost.roofline import stage_coefficients
from medha.sim.replica import Replica, activation_bytes, kv_bytes_per_token

_DECODE_ROWS = 1024
_LENGTHS = tuple(2**k for k in range(8, 21))
_BATCHES = (1, 4, 16)
_LONGEST_BATCH = 1 << 20


class EspCosts:
    """Costs of instances of one size.

    Args:
        spec: the accelerators.
        model: what runs on them.
        num_instances: the largest degree.
        tp: accelerators of an instance.
        utilization: share of the memory that may be used.

    Attributes:
        pool_tokens: tokens whose keys and values an instance holds while it runs no prefill.
        activation_tokens: what the activations of one token take, in tokens of keys and values.
        fit: [degrees + 1, 3], rows alpha, beta, gamma; row 0 is NaN.

    Raises:
        ConfigError: the model does not fit an instance, or cannot be split.
    """

    def __init__(
        self, spec: HardwareSpec, model: ModelConfig, *, num_instances: int, tp: int, utilization: float
    ) -> None:
        parallel = ParallelConfig(tp=tp)
        self.spec, self.model, self.tp = spec, model, tp
        config = SchedulerConfig(max_batch_tokens=_DECODE_ROWS)
        self.pool_tokens = Replica(spec, model, parallel, config, utilization=utilization).pool_tokens()
        one, two = (activation_bytes(model, parallel, 0, tokens) for tokens in (1, 2))
        self._kv_bytes = kv_bytes_per_token(model, parallel, 0)
        self.activation_tokens = (two - one) / self._kv_bytes
        whole = stage_coefficients(spec, model, parallel, 0)
        self._predictor = Predictor(whole, max_tokens=1)
        degrees = (1, *range(1, num_instances + 1))
        self._rings = [ContextParallel(spec, model, cp=degree, tp=tp) for degree in degrees]
        self.fit = np.array([[np.nan] * 3, *(self._fitted(degree) for degree in range(1, num_instances + 1))])
        self._rows = [tuple(row) for row in self.fit.tolist()]

    def prefill_s(self, prompt_tokens: Sequence[int], degree: int) -> float:
        """Seconds of one prefill of these prompts on so many instances."""
        return prefill_s(self._rings[degree], *prompt_tokens)

    def estimate_s(self, degree: int, tokens: float, squares: float) -> float:
        """What the manager takes a prefill for: seconds.

        Args:
            degree: instances, at least 1.
            tokens, squares: sums of the lengths of the prompts, and of their squares.
        """
        alpha, beta, gamma = self._rows[degree]
        return float(alpha + beta * tokens + gamma * squares)

    def _decodes_s(self, count: int, total_kv: float, max_kv: int) -> float:
        return self._predictor.tick(Decodes(count, total_kv, max_kv)).seconds

    def step_s(self, num_requests: int, kv_tokens: float, longest: int, *, num_instances: int, rows: int) -> float:
        """Seconds of one decode step of a group.

        Args:
            num_requests: in the batch.
            kv_tokens: cached on the instance that holds most.
            longest: tokens of the longest request.
            num_instances: over which the keys are spread.
            rows: requests of the master with the most.
        """
        seconds = self._decodes_s(num_requests, kv_tokens, min(longest, round(kv_tokens)))
        if rows < num_requests:
            seconds += self._decodes_s(rows, 0, 0) - self._decodes_s(num_requests, 0, 0)
        if num_instances > 1:
            link = link_of(self._rings[num_instances])
            partial = 2 * num_requests * self.model.num_heads / self.tp * self.model.head_dim
            seconds += self.model.num_layers * (link.alpha_s + partial / link.bytes_per_s)
        return seconds

    def migration_s(self, tokens: float) -> float:
        """Seconds to move the keys and values of some tokens from one instance to another."""
        return self.spec.send.alpha_s + tokens * self._kv_bytes / self.spec.send.bytes_per_s

    def most_tokens(self, used: Sequence[int]) -> float:
        """Prompt tokens that instances with these many cached tokens can prefill together and keep.

        Activations are spread evenly over the instances, keys and values lie wherever there is room. One token an
        instance is left out, for rounding.
        """
        if not used:
            return 0.0
        left = len(used) * self.pool_tokens - sum(used)
        beside = len(used) * (self.pool_tokens - max(used)) / self.activation_tokens
        return min(beside, left / (1 + self.activation_tokens)) - len(used)

    def fits(self, prompt_tokens: int, claim_tokens: int, num_instances: int) -> bool:
        """Whether idle instances can prefill a prompt, and hold what is cached when its request ends."""
        return (
            prompt_tokens <= self.most_tokens([0] * num_instances) and claim_tokens <= num_instances * self.pool_tokens
        )

    def room_tokens(self, used: int, activations: float) -> int:
        """Tokens that an instance has room for beside those cached and the activations of a share of a prefill."""
        return int(self.pool_tokens - activations * self.activation_tokens) - used

    def _fitted(self, degree: int) -> list[float]:
        """Least squares of the relative error, no coefficient below 0."""
        batches = [[n] * b for n in _LENGTHS for b in _BATCHES if n * b <= _LONGEST_BATCH]
        seconds = np.array([self.prefill_s(batch, degree) for batch in batches])
        terms = np.array([(1.0, sum(batch), sum(n * n for n in batch)) for batch in batches])
        found: list[float] = relative_fit(list(terms.T), seconds).tolist()
        return found
