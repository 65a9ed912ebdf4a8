"""The front door: load a model, give it prompts, get text.

from medha import LLM, SamplingParams
with LLM("path/to/model") as llm:
    for output in llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import atexit
import itertools
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from numbers import Number
from pathlib import Path
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from medha.build import Role, build_role
from medha.config import EngineConfig
from medha.engine import Engine, PreparedRequest, Prompt
from medha.errors import DeadlineError, EngineDeadError, RequestError, UnsupportedFeatureError, ValidationError
from medha.jsonl import emptied, opened
from medha.live import refused_output
from medha.parallel.launch import is_first_rank
from medha.request import SLO, RequestOutput, SamplingParams
from medha.sched.journal import check_recordable
from medha.text import Tokenizer
from medha.timeline import Timeline


class LLM:
    """One model, ready to serve.

    Under torchrun every rank builds the same LLM and calls the same methods in the same order. Rank 0's arguments
    count, and every rank returns the same; ``is_driver`` is true on rank 0.

    Args:
        model: local Hugging Face folder, or hub id.
        timeline: records what runs, if given.
        journal: file for what the scheduler is asked and decides, which ``medha replay`` reads; rank 0 writes it.
        options: any option of :class:`medha.config.EngineConfig` by its flat name, for example ``dtype``, ``device``,
            ``max_model_len``, ``max_num_seqs``, ``max_batch_tokens``, ``chunk_size``, ``num_kv_blocks``,
            ``kv_memory`` (bytes, or as ``"4GiB"``), ``block_size``, ``rope_scaling``, ``load_format``, ``seed``.

    Raises:
        ConfigError: an option or the model folder is wrong, or the journal cannot be written; the subclass says what.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        timeline: Timeline | None = None,
        journal: str | Path | None = None,
        **options: Any,
    ) -> None:
        self.config = EngineConfig.from_flat(str(model) if isinstance(model, Path) else model, **options)
        self._files = ExitStack()
        self._role: Role | None = self._build(timeline, None if journal is None else Path(journal))
        if not self._role.is_alone:
            atexit.register(_close_at_exit, weakref.ref(self))
        self._ids = map(str, itertools.count())
        self._streams: dict[str, deque[RequestOutput]] = {}  # outputs that each open stream has not yielded yet

    def _build(self, timeline: Timeline | None, journal: Path | None) -> Role:
        """This rank's part; a journal that cannot be written is found before the model is loaded."""
        with ExitStack() as stack:
            file = None
            if journal is not None:
                check_recordable(self.config.scheduler)
                file = stack.enter_context(opened(journal)) if is_first_rank() else None
            role = build_role(self.config, timeline=timeline)
            if file is not None and role.engine is not None:
                role.engine.record(emptied(file))
            self._files = stack.pop_all()
        return role

    @property
    def engine(self) -> Engine:
        """The engine behind; drive it yourself with ``add_request``, ``abort`` and ``step``.

        Raises:
            EngineDeadError: the LLM is closed, or this is not rank 0 (which alone has the engine; see :meth:`follow`).
        """
        engine = self._open_role.engine
        if engine is None:
            raise EngineDeadError("rank 0 alone has the engine; the other ranks follow() it")
        return engine

    @property
    def is_driver(self) -> bool:
        """Whether this is the rank whose arguments count: rank 0."""
        return self._open_role.follower is None

    def follow(self) -> None:
        """On every rank but 0: take part while rank 0 drives :attr:`engine`, until it closes its LLM."""
        role = self._open_role
        if role.follower is None:
            raise EngineDeadError("rank 0 drives the engine; the other ranks follow it")
        role.follower.close()
        self._role = None

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO | None] | None = None,
        priority: str | Sequence[str] = "normal",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; all are checked before any is queued.

        Args:
            prompts: one prompt or several; each is text, token ids, or a mapping with ``prompt``,
                ``prompt_token_ids`` or ``messages``.
            sampling_params: for all, or one for each.
            slo: for all, or one for each.
            priority: class for all, or one for each: ``realtime``, ``high``, ``normal`` or ``low``.
            use_tqdm: show a progress bar on a terminal.

        Returns:
            One output a prompt, in the order of the prompts. A request that failed alone, or that the option
            ``admission`` refused, has ``error`` set.

        Raises:
            ValidationError: a prompt or parameter is wrong; ``index`` says which; nothing was queued.
            EngineDeadError: a step failed; ``outputs`` holds what was produced.
            KeyboardInterrupt: with ``outputs``: everything produced so far; the LLM can be used again.
        """
        return self._on_every_rank(
            "generate", lambda: self._generate(prompts, sampling_params, slo, priority, use_tqdm)
        )

    def _generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        slo: SLO | Sequence[SLO | None] | None,
        priority: str | Sequence[str],
        use_tqdm: bool,
    ) -> list[RequestOutput]:
        """:meth:`generate` on the rank that drives."""
        engine = self.engine
        arrival_s = engine.now()
        requests = self._prepare(prompts, sampling_params, slo, priority)
        self._refuse_strangers()
        outputs: dict[str, RequestOutput | None] = {request.request_id: None for request in requests}
        num_left = len(requests)
        try:
            for request in requests:
                try:
                    engine.add_prepared(request, arrival_s=arrival_s)
                except DeadlineError as error:
                    outputs[request.request_id] = refused_output(request, arrival_s, engine.now(), error)
                    num_left -= 1
            with _Progress(len(requests), enabled=use_tqdm) as progress:
                while num_left:
                    num_finished = _collect(outputs, self._step())
                    num_left -= num_finished
                    progress.advance(num_finished)
        except KeyboardInterrupt as interrupt:
            engine.abandon()
            _collect(outputs, self._step())
            interrupt.outputs = _present(outputs)  # type: ignore[attr-defined]
            raise
        except EngineDeadError as error:
            _collect(outputs, error.outputs)
            error.outputs = _present(outputs)
            raise
        finally:
            for request_id in outputs:
                engine.abort(request_id)
        return _present(outputs)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO | None] | None = None,
        priority: str | Sequence[str] = "normal",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete one conversation or several with the model's chat template; otherwise as :meth:`generate`."""

        def run() -> list[RequestOutput]:
            conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
            prompts = [{"messages": conversation} for conversation in conversations]
            return self._generate(prompts, sampling_params, slo, priority, use_tqdm)

        return self._on_every_rank("chat", run)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, slo: SLO | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding each new piece (``outputs[0].text`` and ``token_ids`` are the new part).

        The prompt is checked now and queued when the first piece is asked for. Leaving the loop early aborts the
        request. Several streams may be open at once; they, and a :meth:`generate` meanwhile, share the batches.

        Raises:
            ValidationError: as :meth:`generate`.
            UnsupportedFeatureError: there are several ranks.
        """
        if not self._open_role.is_alone:
            raise UnsupportedFeatureError("stream runs on one rank; drive llm.engine, with follow() on the others")
        request = self.engine.prepare(next(self._ids), prompt, sampling_params, slo=slo)
        request.params = request.params.reported("delta")
        return self._stream(request)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None when the folder has none."""
        return self._open_role.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters uses: ``generation_config.json`` over the class defaults."""
        return SamplingParams().resolve(self._open_role.limits.sampling_defaults)

    def close(self) -> None:
        """Drop the model and its memory, and leave the job; every rank calls it, and may call it twice."""
        role, self._role = self._role, None
        with self._files:
            if role is not None:
                role.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if value is None or self._role is None or self._role.is_alone:
            self.close()
        else:  # the other ranks may be anywhere: to wait for them could be for ever
            role, self._role = self._role, None
            with self._files:
                role.give_up(value)

    @property
    def _open_role(self) -> Role:
        if self._role is None:
            raise EngineDeadError("this LLM is closed")
        return self._role

    def _on_every_rank(self, name: str, run: Callable[[], list[RequestOutput]]) -> list[RequestOutput]:
        """Run a call where the engine is, and take part in it elsewhere; all return or raise the same."""
        role = self._open_role
        if role.follower is not None:
            return role.follower.join(name)
        return run() if role.caller is None else role.caller.call(name, run)

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        slo: SLO | Sequence[SLO | None] | None,
        priority: str | Sequence[str],
    ) -> list[PreparedRequest]:
        """Check everything; the first error names its index."""
        listed = _as_list(prompts)
        params = _spread("sampling_params", sampling_params, len(listed))
        slos = _spread("slo", slo, len(listed))
        classes = [priority] * len(listed) if isinstance(priority, str) else _spread("priority", priority, len(listed))
        requests = []
        for index, (prompt, one_params, one_slo, one_class) in enumerate(
            zip(listed, params, slos, classes, strict=True)
        ):
            try:
                request = self.engine.prepare(
                    next(self._ids), prompt, one_params, slo=one_slo, priority=one_class or "normal"
                )
            except ValidationError as error:
                if len(listed) > 1:
                    error.args = (f"prompt {index}: {error}",)
                error.index = index
                raise
            request.params = request.params.reported("final_only")
            requests.append(request)
        return requests

    def _stream(self, request: PreparedRequest) -> Iterator[RequestOutput]:
        engine, request_id = self.engine, request.request_id
        self._refuse_strangers()
        engine.add_prepared(request, arrival_s=engine.now())
        pieces = self._streams[request_id] = deque()
        finished = False
        try:
            while not finished:
                while not pieces:
                    if not engine.has_unfinished:
                        raise RequestError("the outputs of this stream were taken by a call of LLM.engine.step")
                    self._step()
                piece = pieces.popleft()
                finished = piece.finished
                yield piece
        finally:
            del self._streams[request_id]
            engine.abort(request_id)
            while engine.has_unfinished and not engine.num_unfinished:
                self._hand_out(engine.step())  # nothing runs; this drops what is in flight of it

    def _step(self) -> list[RequestOutput]:
        return self._hand_out(self.engine.step())

    def _hand_out(self, outputs: list[RequestOutput]) -> list[RequestOutput]:
        """Keep what belongs to a stream for it; returns all of ``outputs``."""
        for output in outputs:
            if output.request_id in self._streams:
                self._streams[output.request_id].append(output)
        return outputs

    def _refuse_strangers(self) -> None:
        """Stepping would swallow the outputs of requests that were added to the engine directly."""
        num_streaming = sum(not (pieces and pieces[-1].finished) for pieces in self._streams.values())
        if self.engine.num_unfinished > num_streaming:
            raise ValidationError(
                "requests added through LLM.engine are unfinished; accepted: step() until they end, then generate"
            )


def _close_at_exit(llm: weakref.ref[LLM]) -> None:
    """A program that ends without :meth:`LLM.close` closes all the same, unless it ends with an error."""
    there = llm()
    if there is not None and getattr(sys, "last_value", None) is None:
        there.close()


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of prompts."""
    if getattr(prompts, "ndim", None) == 1:
        return [prompts]  # type: ignore[list-item]  # an array of token ids
    listed: Any = prompts.tolist() if hasattr(prompts, "tolist") else prompts  # numpy and torch
    if isinstance(listed, (str, Mapping)):
        return [listed]
    if not isinstance(listed, Sequence) or isinstance(listed, (bytes, bytearray)):
        raise ValidationError(
            f"prompts of type {type(prompts).__name__}; accepted: a prompt or a list of prompts",
            param="prompts",
            value=prompts,
        )
    if listed and isinstance(listed[0], Number):
        return [listed]  # token ids
    return list(listed)


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValidationError(
            f"{len(value)} {name} for {count} prompts; accepted: one, or {count}", param=name, value=value
        )
    return list(value)


def _collect(outputs: dict[str, RequestOutput | None], new: Sequence[RequestOutput]) -> int:
    """Fill in, in place, the finished outputs of requests that ``outputs`` waits for; returns how many there were."""
    waiting = [output for output in new if output.finished and output.request_id in outputs]
    outputs.update((output.request_id, output) for output in waiting)
    return len(waiting)


def _present(outputs: Mapping[str, RequestOutput | None]) -> list[RequestOutput]:
    return [output for output in outputs.values() if output is not None]


class _Progress:
    """A progress bar over requests on stderr, when that is a terminal."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Progress | None = None
        if enabled and total and sys.stderr.isatty():
            columns = [TextColumn("Processed prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
            self._bar = Progress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, count: int) -> None:
        """Count finished requests."""
        if self._bar is not None and count:
            self._bar.advance(self._task, count)
