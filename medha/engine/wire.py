"""What ranks tell each other beside batches, and how it is encoded: sampling states, errors, and in lines of their own
reports, sampled tokens and records of what ran.

A line is the two ends of what goes between the same ranks under one tag of the report group.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from medha import errors
from medha.batch import Batch, Row
from medha.parallel.control import Sends, post_receive
from medha.parallel.mesh import Ranks
from medha.parallel.shared_memory import PAGE_BYTES, Lines
from medha.params import SamplingParams
from medha.records import RankRecords, decode_records, encode_records
from medha.worker.runner import Runner
from medha.worker.sampling import Sampled, SlotSampling
from medha.worker.step import PendingStep, StepResult, sampling_rows
from medha.worker.step_input import StepInput

_ROW_SIZE = 2  # token, finite
_LOGPROB_SIZE = 3  # token, logprob, rank
_REPORTS_IN_FLIGHT = 64
_TOKENS_IN_FLIGHT = 256
_REPORTS_TAG, _RECORDS_TAG, _TOKENS_TAG = 0, 1, 2  # 3 is medha.parallel.spp's, 4 medha.worker.transfer's


def encode_sampling(slot: int, its: SlotSampling) -> list[Any]:
    """A slot and its request's sampling state as JSON has them: tokens of prompt and output are there only where a
    penalty counts them."""
    prompt_ids = None if its.prompt_ids is None else its.prompt_ids.tolist()
    params = {f.name: getattr(its.params, f.name) for f in fields(its.params)}  # asdict would copy long lists
    return [slot, params, its.seed, its.end_ids, its.num_prompt_tokens, prompt_ids, its.output_ids]


def decode_sampling(told: Sequence[Any]) -> tuple[int, SlotSampling]:
    """The inverse of :func:`encode_sampling`."""
    slot, params, seed, end_ids, num_prompt_tokens, ids, output_ids = told
    prompt_ids = None if ids is None else torch.tensor(ids, dtype=torch.int32, device="cpu")
    params = SamplingParams(**params)
    return slot, SlotSampling(params, seed, tuple(end_ids), num_prompt_tokens, prompt_ids, output_ids)


def report_size(rows: Sequence[Row], slots: Sequence[SlotSampling]) -> int:
    """Numbers of the report of a batch, known to both ends from the rows alone."""
    logprobs = sum(1 + slot.params.logprobs for slot in slots if slot.params.logprobs is not None)
    return _ROW_SIZE * len(rows) + _LOGPROB_SIZE * logprobs + 1


def encode_report(result: StepResult, slots: Sequence[SlotSampling]) -> torch.Tensor:
    """The sampled tokens of a batch, then its busy time, float64 [report_size]: it holds ids and float32 exactly."""
    out: list[float] = []
    for sampled, slot in zip(result.sampled, slots, strict=True):
        out += (sampled.token_id, sampled.finite)
        if slot.params.logprobs is not None:
            entries = [number for entry in sampled.logprobs or () for number in entry]
            out += entries + [0] * (_LOGPROB_SIZE * (1 + slot.params.logprobs) - len(entries))
    return torch.tensor([*out, result.busy_s], dtype=torch.float64, device="cpu")


def decode_report(report: torch.Tensor, rows: tuple[Row, ...], slots: Sequence[SlotSampling]) -> StepResult:
    """The inverse of :func:`encode_report`."""
    numbers = iter(report.tolist())
    sampled = []
    for slot in slots:
        token, finite = islice(numbers, _ROW_SIZE)
        entries = None
        if slot.params.logprobs is not None:
            triples = [tuple(islice(numbers, _LOGPROB_SIZE)) for _ in range(1 + slot.params.logprobs)]
            # a vocabulary smaller than the number asked for leaves triples of zeros, whose rank no token has
            entries = tuple((int(token), logprob, int(rank)) for token, logprob, rank in triples if rank) or None
        sampled.append(Sampled(int(token), bool(finite), entries))
    return StepResult(rows, sampled, next(numbers))


def error_to_json(error: BaseException) -> dict[str, Any]:
    """Class name and message of an error, and which parameter of which request a refusal is about, and why."""
    facts = vars(error) if isinstance(error, errors.MedhaError) else {}
    where = {name: fact for name, fact in facts.items() if name != "value"}  # which may be anything
    return {"class": type(error).__name__, "message": str(error), "where": where}


def error_from_json(item: Mapping[str, Any]) -> Exception:
    """An error of the same class with the same message; a RequestError for a class that is not medha's."""
    kind = getattr(errors, item["class"], None)
    if not (isinstance(kind, type) and issubclass(kind, errors.MedhaError)):
        return errors.RequestError(f"{item['class']}: {item['message']}")
    error = kind(item["message"])
    vars(error).update(item["where"])
    return error


class ReportLine:
    """What others tell rank 0, at both ends: the sampling rank of each group reports batches that are done, and all
    ranks send records of what they ran when they are asked."""

    def __init__(self, ranks: Ranks, runner: Runner, lines: Mapping[int, Lines]) -> None:
        self._ranks = ranks
        self._runner = runner
        self._lines = lines  # for short reports, by the other rank
        self._sends = Sends(ranks.report_group, _REPORTS_TAG, _REPORTS_IN_FLIGHT)
        self.drain = self._sends.drain  # waits for every send

    def post(self, batch: Batch, group: int) -> Callable[[], StepResult]:
        """Post the receive of one group's report of its part of a batch, on rank 0; returns what waits for it."""
        rows = sampling_rows(batch, group)
        slots = [self._runner.sampling[row.slot] for row in rows]
        buffer = torch.empty(report_size(rows, slots), dtype=torch.float64, device="cpu")
        rank = self._ranks.sampler_rank(group)
        if self._lines and buffer.nbytes <= PAGE_BYTES:
            limit_s = self._ranks.config.dist_timeout_s
            report: Callable[[], torch.Tensor] = partial(self._lines[rank].reports.receive, buffer, limit_s=limit_s)
        else:
            report = post_receive(buffer, rank, self._ranks.report_group, _REPORTS_TAG)
        return lambda: decode_report(report(), rows, slots)

    def send(self, result: StepResult) -> None:
        """Send what was sampled to rank 0, on another rank."""
        report = encode_report(result, [self._runner.sampling[row.slot] for row in result.rows])
        if self._lines and report.nbytes <= PAGE_BYTES:
            self._lines[self._ranks.rank].reports.send(report)
        else:
            self._sends.add(report, 0)

    def own_records(self) -> RankRecords:
        """What this rank has run since the last call."""
        ranks = self._ranks
        return RankRecords(ranks.rank, ranks.stage, ranks.tp_rank, self._runner.recorder.take(), ranks.group)

    def send_records(self) -> None:
        """Send this rank's records."""
        data = encode_records(self.own_records())
        for tensor in (torch.tensor([len(data)], device="cpu"), torch.frombuffer(bytearray(data), dtype=torch.uint8)):
            dist.send(tensor, dst=0, group=self._ranks.report_group, tag=_RECORDS_TAG)

    def receive_records(self, rank: int) -> RankRecords:
        """Wait for the records of another rank."""
        group = self._ranks.report_group
        size = post_receive(torch.empty(1, dtype=torch.int64, device="cpu"), rank, group, _RECORDS_TAG)()
        data = post_receive(torch.empty(int(size), dtype=torch.uint8, device="cpu"), rank, group, _RECORDS_TAG)()
        return decode_records(data.numpy().tobytes())


class TokenLine:
    """Sends the tokens that this rank draws to those that embed them, and receives what this rank embeds.

    A token goes to the first stages of its request's groups and of the group behind them, into which it may grow; none
    goes anywhere where these groups do not decode, nor to whom the runner has given it on the device.
    """

    def __init__(self, ranks: Ranks, runner: Runner, *, decodes: bool = True) -> None:
        self._ranks = ranks
        self._runner = runner
        self._decodes = decodes
        self._sends = Sends(ranks.report_group, _TOKENS_TAG, _TOKENS_IN_FLIGHT)
        self._drawn_here: dict[int, int] = {}  # by slot, the newest batch
        self._receives: deque[tuple[int, list[int], Callable[[], torch.Tensor]]] = deque()  # by batch

    def post(self, batch: Batch) -> None:
        """Post the receives of a batch's tokens, on a rank that embeds."""
        if not self._decodes:
            return
        group = self._ranks.group
        for sampler_group in sorted({row.group for row in batch.rows if row.group <= group}):
            sampler, slots = self._ranks.sampler_rank(sampler_group), _slots_for(batch, sampler_group, group)
            if slots and sampler != self._ranks.rank and not (sampler_group == group and self._runner.share):
                buffer = torch.empty(len(slots), dtype=torch.int64, device="cpu")
                tokens = post_receive(buffer, sampler, self._ranks.report_group, _TOKENS_TAG)
                self._receives.append((batch.batch_id, slots, tokens))

    def note(self, batch_id: int, slot: int, token: int) -> None:
        """Take a token that another instance drew: a request comes from there with the hand-over of this id."""
        self._receives.append((batch_id, [slot], lambda: torch.tensor([token], device="cpu")))

    def take_from(self, report: Future[StepResult], batch: Batch) -> None:
        """Take a batch's tokens from the report of rank 0's group, on rank 0."""
        slots = [row.slot for row in sampling_rows(batch, self._ranks.group)]
        if slots and self._decodes:
            self._receives.append((batch.batch_id, slots, partial(_tokens_of, report)))

    def run(self, step: StepInput) -> PendingStep | None:
        """Run this rank's part of a batch behind the tokens that it embeds, and send those drawn at once: another
        rank may need them before it takes part in this one's next batch. Where none does, that may be launched behind
        this one, whose tokens nobody has read."""
        with self._runner.recorder.waiting("report"):
            self._wait_for(step)
        pending = self._runner.run(step)
        if pending is None:
            return None
        embedders = self._embedders(step.batch) if self._decodes else {}
        if self._decodes and not embedders:  # with lanes a batch counts as done when this returns
            return pending
        result = pending.result()
        tokens = {row.slot: token.token_id for row, token in zip(result.rows, result.sampled, strict=True)}
        for rank, slots in embedders.items():
            self._sends.add(torch.tensor([tokens[slot] for slot in slots], dtype=torch.int64, device="cpu"), rank)
        return PendingStep(lambda: result)

    def _wait_for(self, step: StepInput) -> None:
        """Note the tokens that a step's decodes embed, once they are here."""
        wanted, queued = set(step.decode_slots.tolist()), list(self._receives)  # a copy, as another thread posts more
        earlier = [(at, slots) for at, (number, slots, _) in enumerate(queued, start=1) if number < step.batch.batch_id]
        needed = [at for at, slots in earlier if not wanted.isdisjoint(slots)]
        # of batches that no decode needs they are taken late, and never before this rank has run its part of the batch
        for _ in range(max([0, *needed, min(len(queued) - _TOKENS_IN_FLIGHT, len(earlier))])):
            batch_id, slots, received = self._receives.popleft()
            tokens = received()
            # A slot may have been given to another request meanwhile, of which this rank draws itself.
            kept = [at for at, slot in enumerate(slots) if self._drawn_here.get(slot, -1) < batch_id]
            if kept:
                self._runner.note_tokens([slots[at] for at in kept], tokens[kept])
        if self._ranks.is_sampler or self._runner.share:
            self._drawn_here.update(dict.fromkeys(step.drawn_slots.tolist(), step.batch.batch_id))

    def _embedders(self, batch: Batch) -> dict[int, list[int]]:
        """The ranks to which tokens drawn here after a batch's rows are sent, and the slots whose tokens they are."""
        here, found = self._ranks.group, dict[int, list[int]]()
        last = max((row.writer for row in sampling_rows(batch, here)), default=here) + 1
        for group in range(here, max(here, min(last, self._ranks.config.kvp - 1)) + 1):
            slots = _slots_for(batch, here, group)
            first_stage = self._ranks.of_groups([group])[: self._ranks.config.of_group(group).tp]
            for rank in first_stage if slots else ():
                if rank not in (0, self._ranks.rank) and not (group == here and self._runner.share):
                    found[rank] = slots
        return found

    def drain(self) -> None:
        """Wait for every transfer."""
        self._sends.drain()
        while self._receives:
            self._receives.popleft()[-1]()


def _tokens_of(report: Future[StepResult]) -> torch.Tensor:
    return torch.tensor([sampled.token_id for sampled in report.result().sampled], device="cpu")


def _slots_for(batch: Batch, sampler_group: int, group: int) -> list[int]:
    """The slots whose tokens go from the sampling rank of one group to those that embed for another."""
    slots = [row.slot for row in sampling_rows(batch, sampler_group) if row.group <= group <= row.writer + 1]
    return sorted(slots)  # the rows of a group's part of a batch are in another order than those of the whole
