"""The engine over ranks: rank 0 schedules and drives, the others follow the control stream.

Rank 0 gives its engine a :class:`DrivingRunner`, which has the interface of :class:`medha.worker.runner.Runner`: a
batch that is submitted goes out as a message, runs on rank 0's own stage, and its result is a report from the sampling
ranks. Every other rank runs :class:`Follower`: it takes messages in order and runs its stage as told, at its own pace.

What travels: the batch to everyone; with it, to all ranks of a group, the tokens of that group's chunks and, once, what
sampling for a request takes; sampled tokens from each group's sampling rank to the ranks that embed them for the next
decode, and in a report to rank 0 (:mod:`medha.engine.wire`). So a decode may be scheduled before its token is known;
where none is, a batch has the tokens of its decodes. A rank reports also a batch after which it draws no token, so that
no more batches than the depth are between the first stage and the last. A group without rows in a batch changes its
block tables, moves what it swaps, and does nothing else. No outputs travel: followers return nothing.

Rank 0's own part runs in a thread, as another rank's does in its main one, so that rank 0 schedules while it computes;
a thread for each group waits for that group's reports, in order: a receive from any source would not notice that a
sender has died. With *lanes* batches that share no group complete independently. A batch goes to the groups with rows
in it alone; the others are told with their next one whose blocks and sampling state it frees. What is prefilled so
decodes elsewhere: no token travels. On CPUs, without stages and with nothing scheduled before its token is known, no
thread has anything to do beside the compute: each rank does all in its main one.

The file is longer than most because the two ends of each message are read beside each other.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import KW_ONLY, InitVar, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from medha.batch import Batch
from medha.engine.wire import ReportLine, TokenLine, decode_sampling, encode_sampling, error_from_json, error_to_json
from medha.errors import EngineDeadError, RankFailedError, is_interrupt
from medha.outputs import RequestOutput
from medha.parallel.control import ControlReceiver, ControlSender, Message
from medha.parallel.health import failures_named, give_up
from medha.parallel.mesh import Ranks, leave
from medha.parallel.shared_memory import Lines
from medha.records import RankRecords, Tracer
from medha.worker.runner import Runner
from medha.worker.sampling import SlotSampling
from medha.worker.step import Lane, PendingStep, StepResult, sampling_rows
from medha.worker.step_input import StepInput
from medha.worker.transfer import TransferLine

logger = logging.getLogger("medha")
IS_EVERYWHERE = "_is_everywhere"  # attribute of an error that all ranks raise


@dataclass(eq=False, repr=False)
class DrivingRunner:
    """Rank 0's runner: sends each batch to the others and runs its own stage of it, and tells them what is called.

    Attributes:
        news: with ``lanes``, set when a batch may have come to be done; None where batches complete in order.
    """

    runner: Runner
    ranks: Ranks
    sender: ControlSender
    _: KW_ONLY
    lanes: InitVar[bool] = False
    ahead: InitVar[bool] = True  # decodes are scheduled before their tokens are known; else these go with the batch
    transfers: TransferLine | None = None  # where there are decode instances, and so lanes
    lines: InitVar[dict[int, Lines] | None] = None
    timeline: Tracer | None = None  # gets what the others have recorded before they leave

    def __post_init__(self, lanes: bool, ahead: bool, lines: dict[int, Lines] | None) -> None:
        runner, ranks = self.runner, self.ranks
        self._tells_tokens = not (ahead or lanes)  # a batch has those of its decodes
        # Where nothing is to be done beside a batch it runs when its result is asked for.
        self._in_turn = self._tells_tokens and ranks.config.spp == 1 and runner.device.type == "cpu"
        self._reports = ReportLine(ranks, runner, lines or {})
        self._tokens = TokenLine(ranks, runner, decodes=ahead and not lanes)
        self.news = threading.Event() if lanes else None
        waiting = nullcontext if self._in_turn else partial(runner.recorder.waiting, "control")
        self._own = Lane("medha-own", waiting)  # runs this rank's part of batches
        if runner.device.type == "cuda":
            self._own.submit(partial(torch.cuda.set_device, runner.device))
        self._awaited = [Lane("medha-reports") for _ in range(ranks.config.num_groups)]  # each waits for a group
        self._ends = [weakref.finalize(self, lane.close) for lane in (self._own, *self._awaited)]
        self._sampled_on: dict[int, int] = {}  # the group that has the sampling state of a slot
        self._num_in_pipeline = 0
        self._is_interrupted = False
        self._awaits = lanes  # whether the main thread waits for the others; with lanes it does where nothing is to do
        if self._in_turn:
            for its in (lines or {}).values():
                its.reports.look()
        else:
            ranks.monitor.computing, ranks.monitor.waits_for = self._own.thread, self._waits_for
        self._groups = groups = range(ranks.config.num_groups)
        # by group, what it is told with its next batch: slots that batches of other groups of its instance have freed,
        # and slots that requests have left
        self._freed: list[list[int]] = [[] for _ in groups]
        self._closed: list[list[int]] = [[] for _ in groups]
        self._ranks_of = [[rank for rank in ranks.of_groups([group]) if rank != 0] for group in groups]

    def open(self, slot: int, prompt_ids: npt.NDArray[np.int32], sampling: SlotSampling, drawn: list[int]) -> None:
        """See :meth:`medha.worker.runner.Runner.open`; the others hear of it with the rows that concern them."""
        self.runner.open(slot, prompt_ids, sampling, drawn)
        self._sampled_on.pop(slot, None)

    def close(self, slot: int) -> None:
        """See :meth:`medha.worker.runner.Runner.close`."""
        self.runner.close(slot)
        if self._sampled_on.pop(slot, None) is not None:
            for closed in self._closed:
                closed.append(slot)

    def reset(self) -> None:
        """Raise EngineDeadError: an interrupted step cannot be undone on other ranks."""
        self._is_interrupted = True
        raise EngineDeadError("a step was interrupted; the other ranks have part of it, so the engine has ended")

    def submit(self, batch: Batch) -> PendingStep:
        """Send a batch to the ranks that it concerns and prepare this rank's part, which runs after those before it.

        Raises:
            RankFailedError: another rank failed; the message is the first error that any rank reported.
        """
        with failures_named(self.ranks.monitor, batch):
            self._num_in_pipeline += 1
            return self._submit(batch)

    def _submit(self, batch: Batch) -> PendingStep:
        parts, ids = dict[int, Batch](), dict[int, npt.NDArray[np.int32]]()
        for group, whole, fields in self._told(batch):
            parts[group] = part = whole.part_of(group)
            ids[group] = self.runner.chunk_ids(part, decodes=self._tells_tokens)
            if opened := self._opened(part, group):
                fields["open"] = opened
            self.sender.send(Message("batch", fields, whole, ids[group]), only=self._ranks_of[group])
        concerned = [group for group in sorted(parts) if parts[group].rows and self.ranks.sampler_rank(group) != 0]
        posted = {group: self._reports.post(parts[group], group) for group in concerned}
        if self._in_turn:
            step = self.runner.prepare(parts[0], ids[0])
            return PendingStep(partial(self._completed, batch, [partial(self._tokens.run, step), *posted.values()]))
        reports = {group: self._awaited[group].submit(report) for group, report in posted.items()}
        if 0 in reports:
            self._tokens.take_from(reports[0], parts[0])
        futures: list[Future[Any]] = [*reports.values()]
        if 0 in parts:
            step = self.runner.prepare(parts[0], ids[0])
            futures.insert(0, self._own.submit(partial(self._tokens.run, step)))
        pending = PendingStep(partial(self._completed, batch, [future.result for future in futures]))
        if self.news is None:
            return pending
        wake = self.news.set
        for future in futures:
            future.add_done_callback(lambda _: wake())
        monitor = self.ranks.monitor
        return pending._replace(is_done=lambda: monitor.has_failure or all(future.done() for future in futures))

    def _told(self, batch: Batch) -> Iterator[tuple[int, Batch, dict[str, Any]]]:
        """Each group, the batch as it gets it, with what was freed since its last one, and what else it is told: which
        slots were closed since then."""
        groups, kvp = list(self._groups) if self.news is None else sorted(batch.groups), self.ranks.config.kvp
        for group in range(kvp) if groups[0] < kvp else groups:
            self._freed[group] += batch.frees
        for group in groups:
            frees, closed = tuple(dict.fromkeys(self._freed[group])), self._closed[group]
            self._freed[group], self._closed[group] = [], []
            whole = batch if frees == batch.frees else replace(batch, frees=frees)
            yield group, whole, {"close": closed} if closed else {}

    def hand_over(self, token: int, held: Sequence[tuple[int, int]], batch: Batch) -> Future[None]:
        """Begin to hand a request over to a decode instance, with the last token drawn of it; what is returned is done
        when the instance has all.

        Args:
            token: what the instance embeds first.
            held, batch: as of :meth:`medha.worker.transfer.TransferLine.begin`.
        """
        assert self.transfers is not None and self.news is not None, "there are decode instances"
        wake, ranks = self.news.set, self.ranks.of_groups([*(group for group, _ in held), batch.shared[0].group])
        with failures_named(self.ranks.monitor, batch):
            receipt = self.transfers.receipt(batch)
            receipt.add_done_callback(lambda _: wake())
            message = Message("handover", {"token": token, "held": held}, batch)
            self.sender.send(message, only=[rank for rank in ranks if rank != 0])
        if 0 in ranks:
            self.transfers.begin(held, batch)
        return receipt

    def _waits_for(self) -> str | None:
        """What of other ranks this one waits for; where its part of batches has run and the next is being decided, for
        nothing."""
        what = self.runner.recorder.waits_for
        return what if self._awaits or what != "control" else None

    def _opened(self, part: Batch, group: int) -> list[list[Any]]:
        """What a group's sampling rank is to know of the requests that it samples for the first time, or again after
        another has."""
        opened = []
        for row in sampling_rows(part, group):
            if self._sampled_on.get(row.slot) != group:
                self._sampled_on[row.slot] = group
                sampling = self.runner.sampling_so_far(row.slot)
                if self.ranks.sampler_rank(group) != 0:
                    opened.append(encode_sampling(row.slot, sampling))
        return opened

    def _completed(self, batch: Batch, parts: Sequence[Callable[[], StepResult | PendingStep | None]]) -> StepResult:
        """Wait for a batch, with lanes one that is done, else the oldest in the pipeline: for what rank 0 itself
        sampled, and the reports of the groups that it concerns; raises as :meth:`submit`."""
        with failures_named(self.ranks.monitor, batch):
            if self.news is not None and self.ranks.monitor.has_failure:  # what it waits for may never come
                raise RankFailedError(self.ranks.monitor.first_error() or "a rank has failed")
            self._awaits = True
            ran = [its for part in parts if (its := part()) is not None]
            results = [its.result() if isinstance(its, PendingStep) else its for its in ran]
            self._awaits = self.news is not None
        rows = tuple(row for result in results for row in result.rows)
        sampled = [token for result in results for token in result.sampled]
        whole = StepResult(rows, sampled, max(result.busy_s for result in results))
        self._num_in_pipeline -= 1
        if not self._num_in_pipeline:
            self.ranks.monitor.doing("idle")  # until there are requests
        return whole

    def gather_records(self) -> list[RankRecords]:
        """What each rank has run since the last call, rank 0 first; waits until the others follow.

        After a failure the other ranks cannot be asked, and only rank 0's own records are returned.
        """
        if self._is_interrupted or self.ranks.monitor.has_failure:
            logger.warning("the run has failed: what the other ranks ran is not known")
            return [self._reports.own_records()]
        with failures_named(self.ranks.monitor):
            records = [self._own.submit(self._reports.own_records).result()]
            self.sender.send(Message("records"))
            return records + [self._reports.receive_records(rank) for rank in range(1, self.ranks.config.world_size)]

    def call(self, name: str, run: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Run a call that every rank has joined; what it raises, all of them raise."""
        self._say(Message("call", {"name": name}))
        try:
            outputs = run()
        except BaseException as error:
            if not isinstance(error, EngineDeadError) and not is_interrupt(error):
                self._say(Message("end", {"error": error_to_json(error)}))
                vars(error)[IS_EVERYWHERE] = True
            else:  # the others may be gone, or anywhere, and hear of it from the monitor
                give_up(self.ranks.monitor, error)
            raise
        self._say(Message("end", {"error": None}))
        return outputs

    def stop(self) -> None:
        """Let the others stop, then leave the process groups.

        Raises:
            RankFailedError: another rank failed before all had left.
        """
        with failures_named(self.ranks.monitor, activity="shutdown"):
            if self._is_interrupted:  # the others are in the middle of a step
                raise EngineDeadError("a step was interrupted")
            if self.timeline is not None:
                self.timeline.close()
            self._own.submit(lambda: None).result()  # what runs still
            for end in self._ends:
                end()
            self.sender.send(Message("stop"))
            self.sender.drain()
            _leave(self)

    def _say(self, message: Message) -> None:
        with failures_named(self.ranks.monitor, activity="idle"):
            self.sender.send(message)


@dataclass(eq=False, repr=False)
class Follower:
    """What every rank but 0 does: run its stage of each batch in the order of the messages."""

    runner: Runner
    ranks: Ranks
    _: KW_ONLY
    decodes: InitVar[bool] = True  # this rank's group does
    ahead: InitVar[bool] = True  # as of DrivingRunner
    depth: InitVar[int] = 1  # batches that rank 0 may send before this rank has run one
    transfers: TransferLine | None = None
    lines: InitVar[dict[int, Lines] | None] = None

    def __post_init__(self, decodes: bool, ahead: bool, depth: int, lines: dict[int, Lines] | None) -> None:
        ranks = self.ranks
        self._reports = ReportLine(ranks, self.runner, lines or {})
        self._tokens = TokenLine(ranks, self.runner, decodes=decodes and ahead)
        self._newest: Message | None = None
        line = lines[ranks.rank].control if lines else None
        in_turn = decodes and not ahead and ranks.config.spp == depth == 1  # else a message may fill the line
        self._receiver = ControlReceiver(ranks.control_group, self._take, line, in_turn=in_turn)

    def describe(self) -> str:
        """How many messages have come that were not followed, and the last one; for another thread."""
        last = "none" if self._newest is None else f"{self._newest.kind} {dict(self._newest.fields)!r:.200}"
        return f"{self.ranks.monitor.place}: {self._receiver.arrived.qsize()} messages are here; last message: {last}"

    def follow(self) -> Message:
        """Run batches until a message of another kind comes; returns that message.

        Raises:
            RankFailedError: another rank failed, or this one.
        """
        while True:
            with failures_named(self.ranks.monitor), self.runner.recorder.waiting("control"):
                message, step = self._receiver.receive()
            with failures_named(self.ranks.monitor, message.batch):
                if isinstance(step, Exception):
                    raise step
                if step is not None:
                    if (pending := self._tokens.run(step)) is not None:
                        self._reports.send(pending.result())
                elif message.kind == "records":
                    self._reports.send_records()
                elif message.kind != "handover":
                    return message

    def _take(self, message: Message) -> tuple[Message, StepInput | Exception | None]:
        """Prepare a batch while another one computes, or begin to move a request's KV; what went wrong is raised in its
        turn."""
        self._newest, batch, step = message, message.batch, None
        try:
            if message.kind == "handover":
                assert self.transfers is not None and batch is not None, "there are decode instances"
                slot, target = batch.shared[0][:2]
                if target == self.ranks.group:
                    self._tokens.note(batch.batch_id, slot, message.fields["token"])
                self.transfers.begin(message.fields["held"], batch)
            elif batch is not None:
                step = self._prepare(message, batch)
        except Exception as error:
            return message, error
        return message, step

    def _prepare(self, message: Message, batch: Batch) -> StepInput:
        """Prepare a batch and post what it will receive, so that the transfers run while something else computes."""
        for slot in message.fields.get("close", ()):
            self.runner.close(slot)
        part = batch.part_of(self.ranks.group)
        self.runner.sampling.update(map(decode_sampling, message.fields.get("open", ())))
        if self.runner.pipe is not None and part.rows:
            self.runner.pipe.post(part)
        if self.ranks.stage == 0:
            self._tokens.post(batch)
        return self.runner.prepare(part, message.token_ids)

    def call(self, name: str, run: object) -> list[RequestOutput]:
        """Follow a call that rank 0 runs to its end, which leaves nothing here; raises what it raised.

        Raises:
            EngineDeadError: rank 0 called something else, of which every rank hears, or a rank has failed.
        """
        self._follow_to(name, "call")
        if (told := self._follow_to(name, "end").fields["error"]) is not None:
            error = error_from_json(told)
            vars(error)[IS_EVERYWHERE] = True
            raise error
        return []

    def stop(self) -> None:
        """Follow until rank 0 stops, then leave the process groups; raises as :meth:`call`."""
        self._follow_to("close", "stop")
        with failures_named(self.ranks.monitor, activity="shutdown"):
            self._tokens.drain()
            self._reports.drain()
            _leave(self)
        del self._receiver  # which holds this

    def _follow_to(self, name: str, kind: str) -> Message:
        if self.ranks.monitor.has_failure:  # there is nobody to follow
            raise RankFailedError(self.ranks.monitor.first_error() or "a rank has failed")
        message = self.follow()
        if (message.kind, message.fields.get("name", name)) == (kind, name):
            return message
        theirs = {"call": str(message.fields.get("name")), "stop": "close"}.get(message.kind, message.kind)
        what = f"{self.ranks.monitor.place} called {name} where rank 0 called {theirs}"
        error = EngineDeadError(f"{what}; accepted: the same calls on every rank")
        give_up(self.ranks.monitor, error)
        raise error


def _leave(part: DrivingRunner | Follower) -> None:
    """Leave the process groups, with nothing on its way."""
    if part.transfers is not None:
        part.transfers.close()
    part.runner.drop_graphs()  # NCCL would wait for the graphs that hold its collectives
    leave(part.ranks)
