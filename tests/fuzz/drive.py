"""Runs a case, on several ranks in processes that stay up over many cases, and reads what came out."""

import logging
import random
import re
import traceback
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from itertools import repeat
from math import isclose
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

import pytest

from medha import LLM, SLO, RequestOutput, SamplingParams
from medha.batch import Batch
from medha.engine.arrivals import together
from medha.engine.engine import Engine
from medha.engine.replay import replay
from medha.errors import ValidationError
from medha.parallel.own_ranks import launch_environment
from medha.worker.step import PendingStep, StepResult
from medha.worker.swap import HostCache
from tests.engines import left_behind
from tests.fuzz.cases import Ask, Case
from tests.fuzz.mutations import MUTATIONS
from tests.fuzz.reference import Answer, Failure, check, prompt_of, write_checkpoint
from tests.parallel.workers import WorkerPool

_HANG_S = 300.0  # a case takes seconds


def failure_of(case: Case, workers: WorkerPool | None = None, *, mutation: str | None = None) -> Failure | None:
    """Run a case and hold it to its reference; returns what is wrong.

    ``workers`` are processes for the ranks, without which a case of one rank runs in this one; ``mutation`` is a defect
    to put in, of :data:`tests.fuzz.mutations.MUTATIONS`.
    """
    try:
        with TemporaryDirectory(prefix="fuzz-") as name, closing(WorkerPool()) as fresh:
            reference = write_checkpoint(case.model, folder := Path(name))
            if workers is None:
                answers, fits = serve(case, folder, mutation)
            else:
                pool = fresh if case.decode[0] else workers  # DTensor keeps groups' names: tests/parallel/conftest.py
                answers, fits = pool.run(serve, case.world, case, folder, mutation, limit_s=_HANG_S)[0]
            check(case, answers, fits, reference)
    except Failure as failure:
        return failure
    except Exception as error:
        text = "".join(traceback.format_exception(error))  # with those of the ranks
        kinds = re.findall(r"^(?:[\w.]+\.)?(Failure: \w+|\w*Error|hang)", text, flags=re.MULTILINE)
        kind = next((kind for kind in kinds if kind != "AssertionError"), "died")
        return Failure(kind.removeprefix("Failure: "), text)
    return None


def serve(case: Case, folder: Path, mutation: str | None) -> tuple[list[Answer], list[int]]:
    """On each rank: build the LLM and take part; rank 0 drives and returns the answers, and how many tokens fit where
    requests are prefilled, and on a decode instance if there is one."""
    degrees = dict(zip(("tp", "spp", "kvp"), case.layout, strict=True))
    if case.decode[0]:
        degrees |= dict(zip(("decode_replicas", "decode_tp"), case.decode, strict=True))
    journal = None if case.decode[0] else folder / "journal"
    options = {"dtype": "float32", "num_threads": 1, "dist_timeout": 900.0} | case.options | degrees
    with pytest.MonkeyPatch.context() as patch:
        for name in launch_environment(0, 1, 0) if case.world == 1 else ():
            patch.delenv(name, raising=False)  # one process, not a job of one rank
        patch.setattr(logging.getLogger("medha"), "disabled", True)
        block_s = 1e-9 if case.step_s < 1e-4 else 1e-5  # a third of the cases swap whatever goes
        patch.setattr(HostCache, "measure_block_s", lambda self: block_s)
        if mutation is not None:
            MUTATIONS[mutation].put_in(patch)
        with LLM(folder, journal=journal, **options) as llm:
            if not llm.is_driver:
                llm.follow()
                return [], []
            answers = _drive(case, llm.engine)
            memories = [llm.engine.scheduler.memory, llm.engine.hand_overs.largest]
            fits = [memory.max_request_tokens for memory in memories if memory is not None]
    if journal is not None and (found := replay(journal)).mismatch is not None:
        raise Failure("journal", str(found.mismatch))
    return answers, fits


class _Timed:
    """A runner on the time of a case: each step takes as long as the case says, whatever it took.

    Where batches complete independently each group computes its own one after the other, and the one that ends first by
    that time completes first; a hand-over is over so many questions after it.
    """

    def __init__(self, runner: Any, case: Case) -> None:
        self.runner, self._case, self._random = runner, case, random.Random(0)
        self.now_s = 0.0
        self._free_s: dict[int, float] = {}  # by group, when it is done with what was submitted
        self._ends_s: list[float] = []  # of the batches in flight

    def __getattr__(self, name: str) -> Any:
        return getattr(self.runner, name)

    def submit(self, batch: Batch) -> PendingStep:
        """Start a batch; time goes on when it is waited for."""
        case, rng = self._case, self._random
        factor = rng.uniform(0.7, 1.4) * (case.spike if rng.random() < 0.05 else 1.0)
        busy_s = factor * (case.step_s + case.token_s * batch.num_tokens)
        in_lanes = getattr(self.runner, "news", None) is not None
        pending, ends_s = self.runner.submit(batch), self._ends_s
        end_s = max(self.now_s, *(self._free_s.get(group, 0.0) for group in batch.groups)) + busy_s
        self._free_s |= dict.fromkeys(batch.groups, end_s)
        ends_s.append(end_s)

        def result() -> StepResult:
            done: StepResult = pending.result()
            ends_s.remove(end_s)
            self.now_s = end_s if in_lanes else self.now_s + busy_s
            return done._replace(busy_s=busy_s)

        return PendingStep(result, lambda: end_s == min(ends_s)) if in_lanes else PendingStep(result)

    def hand_over(self, *args: Any) -> Any:
        """Begin a hand-over, of which the engine hears a few questions later, however long it took."""
        future, answers = self.runner.hand_over(*args), repeat(False, self._random.choice([0, 0, 1, 3, 10]))
        return SimpleNamespace(done=lambda: next(answers, True), result=future.result)


def _answer(ask: Ask, outputs: Sequence[RequestOutput]) -> Answer:
    """What a request has said in all its outputs; Failure if they do not fit together."""
    kind, last = ask.params.get("output_kind", "cumulative"), outputs[-1]
    if last.error is not None:
        raise Failure(type(last.error).__name__, f"{ask}: {last.error}")
    one = (together(outputs) if kind == "delta" else last).outputs[0]
    before = [output.outputs[0].token_ids for output in outputs[:-1]]
    has_changed = kind == "cumulative" and any(one.token_ids[: len(tokens)] != tokens for tokens in before)
    num_told = len(one.token_ids) if "logprobs" not in ask.params else len(one.logprobs or ())
    if has_changed or (kind == "final_only" and before) or num_told != len(one.token_ids):
        raise Failure("output", f"{kind} output {last} after {before}")
    explained = last.metrics.explanation
    if explained is not None and not isclose(sum(explained.parts_s.values()), explained.total_s, abs_tol=1e-6):
        raise Failure("explanation", f"of request {last.request_id} does not add up: {explained}")
    told = one.logprobs
    logprobs = None if told is None else tuple({i: entry.logprob for i, entry in step.items()} for step in told)
    return Answer(None, tuple(one.token_ids), one.text or "", one.finish_reason, one.stop_reason, logprobs)


def _drive(case: Case, engine: Engine) -> list[Answer]:
    """Put a fresh engine on the case's time; then add, abort and step until all is done."""
    timed = _Timed(engine.runner, case)
    engine.runner, engine._clock, engine._start = timed, lambda: timed.now_s, 0.0
    engine.hand_overs.begin = timed.hand_over
    # Within so many steps all could be computed several times, a token a step: somebody must have got a token.
    patience = 200 + 5 * sum(ask.length + ask.max_tokens for ask in case.asks)
    pending = list(enumerate(case.asks))
    added: dict[str, tuple[Ask, int]] = {}  # and before which step
    outputs = defaultdict[str, list[RequestOutput]](list)
    answers: dict[str, Answer] = {}
    num_tokens: dict[str, int] = {}
    step = last_step = 0
    while pending or engine.has_unfinished:
        while pending and pending[0][1].at <= step:
            number, ask = pending.pop(0)
            prompt = {"prompt_token_ids": prompt_of(ask, case.model.vocab)}
            slo = None if ask.slo is None else SLO(*ask.slo)
            try:
                engine.add_request(str(number), prompt, SamplingParams(**ask.params), slo=slo, priority=ask.priority)
            except ValidationError as error:
                answers[str(number)] = Answer(type(error).__name__)
            else:
                added[str(number)] = ask, step
        for key, (ask, since) in added.items():
            if ask.abort is not None and step - since >= ask.abort:
                engine.abort(key)
        if case.abandon == step:
            engine.abandon()
        for output in engine.step(wait_s=0.0):
            key = output.request_id
            if key in answers or key not in added:
                raise Failure("output", f"of request {key}, which has ended or was never taken")
            outputs[key].append(output)
            if output.finished:
                answers[key] = _answer(added[key][0], outputs[key])
        before, live = num_tokens, engine.live.items()
        num_tokens = {key: sum(one.metrics.num_output_tokens for one in it.completions) for key, it in live}
        last_step = last_step if num_tokens == before else step
        if step - last_step > patience:
            raise Failure("stall", f"no token in steps {last_step} to {step} for {list(num_tokens)}")
        step += 1
        if pending and not engine.has_unfinished:
            step = max(step, pending[0][1].at)
    if found := left_behind(engine):
        raise Failure("left", f"behind when all is done: {found}")
    return [answers[str(number)] for number in range(len(case.asks))]
