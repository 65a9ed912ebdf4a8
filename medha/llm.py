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
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from contextlib import AbstractContextManager, ExitStack, closing, nullcontext
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from medha.cli.files import emptied, opened
from medha.config import EngineConfig
from medha.engine.admission import Prompt, is_prompt, listed, spread
from medha.engine.build import RankHandle, build_role
from medha.engine.engine import Engine
from medha.engine.journal import check_recordable
from medha.engine.request import Request
from medha.engine.threads import SOON_S, Preparing
from medha.errors import EngineDeadError, UnsupportedFeatureError, ValidationError, is_interrupt
from medha.outputs import RequestOutput
from medha.parallel.launch import is_first_rank
from medha.params import CHAT_OPTIONS, SLO, SamplingParams
from medha.records import Tracer
from medha.text import Tokenizer

_UNNAMED = "-"  # the id of a request until it is queued


class LLM(AbstractContextManager["LLM"]):
    """One model, ready to serve.

    Threads may share an LLM: the requests of their calls share the batches, each thread gets the outputs of its own,
    and steps are made in turn. Over several ranks one call is served after the other.

    Under torchrun every rank builds the same LLM and calls the same methods in the same order. Rank 0's arguments
    count, and it alone gets the outputs (``is_driver`` is true there); the others return empty lists.

    Args:
        model: local Hugging Face folder, or hub id.
        timeline: a :class:`medha.timeline.Timeline`, which records what runs.
        journal: file for what the scheduler is asked and decides, which ``medha replay`` reads; rank 0 writes it.
        options: any option of :class:`medha.config.EngineConfig` by its flat name, for example ``dtype``, ``device``,
            ``max_model_len``, ``kv_memory`` (bytes, or as ``"4GiB"``) or ``chunk_size``.

    Raises:
        ConfigError: an option or the model folder is wrong, or the journal cannot be written; the subclass says what.
    """

    def __init__(
        self, model: str | Path, *, timeline: Tracer | None = None, journal: str | Path | None = None, **options: Any
    ) -> None:
        self.config = EngineConfig.from_flat(str(model) if isinstance(model, Path) else model, **options)
        if journal is not None:
            check_recordable(self.config.scheduler, self.config.parallel.decode_replicas)
        with ExitStack() as stack:  # a journal that cannot be written is found before the model is loaded
            file = stack.enter_context(opened(Path(journal))) if journal is not None and is_first_rank() else None
            role = stack.enter_context(build_role(self.config, timeline=timeline))
            if file is not None and role.engine is not None:
                role.engine.record(emptied(file))
            self._stack = stack.pop_all()  # what closing this leaves
        self._role: RankHandle | None = role
        if role.part is not None:
            atexit.register(_close_at_exit, self)
        self._ids = map(str, itertools.count())
        self._calls = threading.RLock()  # over several ranks one call at a time

    @property
    def engine(self) -> Engine:
        """The engine behind; drive it yourself with ``add_request``, ``abort`` and ``step``.

        Raises:
            EngineDeadError: the LLM is closed, or this is not rank 0 (which alone has the engine; see :meth:`follow`).
        """
        if (engine := self._open_role.engine) is None:
            raise EngineDeadError("rank 0 alone has the engine; the other ranks follow() it")
        return engine

    @property
    def is_driver(self) -> bool:
        """Whether this is the rank whose arguments count: rank 0."""
        return self._open_role.engine is not None

    def follow(self) -> None:
        """On every rank but 0: take part while rank 0 drives :attr:`engine`, until it closes its LLM."""
        if self.is_driver:
            raise EngineDeadError("rank 0 drives the engine; the other ranks follow it")
        self.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO | None] | None = None,
        priority: str | Sequence[str] = "normal",
        tenant: str | Sequence[str] = "",
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; all are checked before any is queued.

        Args:
            prompts: one or several; each is text, token ids, or a mapping with ``prompt``, ``prompt_token_ids`` or
                ``messages``.
            sampling_params, slo, priority, tenant: for all, or one for each; the class is ``realtime``, ``high``,
                ``normal`` or ``low``; tenants share the machine fairly.
            use_tqdm: show a progress bar on a terminal.

        Returns:
            One output a prompt, in the order of the prompts; on ranks other than 0, which only take part, nothing. A
            request that failed alone, or that the engine refused when it was queued, has ``error`` set.

        Raises:
            ValidationError: a prompt or parameter is wrong (``index``).
            EngineDeadError: a step failed; ``outputs`` holds what was produced.
            KeyboardInterrupt, or what a signal handler raised: with ``outputs``: everything produced so far; on one
                rank the LLM can be used again.
        """

        def run() -> list[RequestOutput]:
            given = {"sampling_params": sampling_params, "slo": slo, "priority": priority, "tenant": tenant}
            return self._serve(lambda: self._prepare(listed(prompts), **given), use_tqdm)

        role = self._open_role
        with nullcontext() if role.part is None else self._calls:
            return role.call("generate", run)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]] | Sequence[Sequence[Mapping[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO | None] | None = None,
        priority: str | Sequence[str] = "normal",
        tenant: str | Sequence[str] = "",
        use_tqdm: bool = True,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[RequestOutput]:
        """Complete one conversation or several with the model's chat template; otherwise as :meth:`generate`.

        ``prompt`` of an output is the text that the template wrote.

        Args:
            messages: one conversation or several; each is a list of mappings with ``role`` and ``content``.
            add_generation_prompt: whether the template opens the assistant's turn.
            tools: functions that the model may call, for templates that describe them.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking``.
        """
        options = dict(zip(CHAT_OPTIONS, (add_generation_prompt, tools, chat_template_kwargs), strict=True))
        several = isinstance(messages, (list, tuple)) and not (messages and isinstance(messages[0], Mapping))
        prompts: list[Prompt] = [{"messages": one, **options} for one in (messages if several else [messages])]
        return self.generate(prompts, sampling_params, slo=slo, priority=priority, tenant=tenant, use_tqdm=use_tqdm)

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        *,
        slo: SLO | None = None,
        priority: str = "normal",
        tenant: str = "",
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding each new piece (``outputs[0].text`` and ``token_ids`` are the new part).

        The prompt is checked now and queued when the first piece is asked for. Leaving the loop early aborts the
        request. Several streams may be open at once, also in several threads; they, a :meth:`generate` meanwhile and
        requests added to :attr:`engine` share the batches.

        Raises:
            ValidationError: as :meth:`generate`; several prompts.
            UnsupportedFeatureError: there are several ranks.
        """
        if isinstance(prompt, (list, tuple)) and prompt and not is_prompt(prompt):
            message = f"stream takes one prompt, and this is a list of {len(prompt)}; accepted: one of them"
            raise ValidationError(message, param="prompt", value=prompt)
        if self._open_role.part is not None:
            raise UnsupportedFeatureError("stream runs on one rank; drive llm.engine, with follow() on the others")
        given = {"slo": slo, "priority": priority, "tenant": tenant}
        request = self.engine.prepare(_UNNAMED, prompt, sampling_params, **given)
        request.params = request.params.reported("delta")
        return self._stream(request)

    def reset_prefix_cache(self) -> None:
        """Forget what is kept of requests that have ended; on other ranks than 0 nothing is to be done."""
        if self.is_driver:
            self.engine.reset_prefix_cache()

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None where the folder has none."""
        return self._open_role.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters uses: ``generation_config.json`` over the class defaults."""
        return self._open_role.limits.default_params

    def close(self) -> None:
        """Drop the model and its memory, and leave the job; every rank calls it, and may call it twice."""
        self.__exit__(None, None, None)

    def __exit__(self, *exc: Any) -> None:
        is_alone = self._role is None or self._role.part is None or any(exc)
        with nullcontext() if is_alone else self._calls:  # who calls in another thread comes to an end
            self._role = None
            self._stack.__exit__(*exc)

    @property
    def _open_role(self) -> RankHandle:
        if self._role is None:
            raise EngineDeadError("this LLM is closed")
        return self._role

    def _serve(self, prepare: Callable[[], list[Request]], use_tqdm: bool) -> list[RequestOutput]:
        """Serve what is prepared beside the running engine, on the rank that drives."""
        engine = self.engine
        arrival_s = engine.now()
        box, requests, outputs = deque[RequestOutput](), list[Request](), list[RequestOutput]()
        try:
            requests = _prepared_beside(engine, prepare)
            try:
                for request in requests:
                    try:
                        self._add(request, arrival_s, box)
                    except ValidationError as error:
                        box.append(request.refused(arrival_s, engine.now(), error))
                with _progress(enabled=use_tqdm and bool(requests)) as bar:
                    task = bar.add_task("Processed prompts", total=len(requests))
                    for _ in requests:
                        outputs.append(self._next(box))
                        bar.advance(task)
            finally:
                engine.end(request.request_id for request in requests if request.completions and request.num_running)
        except EngineDeadError as error:
            if not any(request.completions for request in requests):  # it was dead before
                raise
            # the engine's has the outputs of others, too
            raise type(error)(str(error), _present(requests, [*outputs, *box])) from error
        except BaseException as error:
            if is_interrupt(error):
                vars(error)["outputs"] = _present(requests, [*outputs, *box])
            raise
        return _present(requests, outputs)

    def _prepare(self, prompts: Sequence[Prompt], **given: Any) -> list[Request]:
        """Check everything, each of what is given for all or one for each prompt; the first error names its index."""
        spreads = (spread(name, value, len(prompts)) for name, value in given.items())
        requests = []
        for index, (prompt, params, slo, order, tenant) in enumerate(zip(prompts, *spreads, strict=True)):
            wanted = {"slo": slo, "priority": "normal" if order is None else order, "tenant": tenant}
            try:
                request = self.engine.prepare(_UNNAMED, prompt, params, **wanted)
            except ValidationError as error:
                if len(prompts) > 1:
                    error.args = (f"prompt {index}: {error}",)
                error.index = index
                raise
            request.params = request.params.reported("final_only")
            requests.append(request)
        return requests

    def _add(self, request: Request, arrival_s: float, box: deque[RequestOutput]) -> None:
        """Queue a request for whoever waits at ``box``, by an id that none has which was added to the engine itself."""
        with self.engine.turns:
            request.request_id = next(name for name in self._ids if name not in self.engine.live)
            self.engine.add_prepared(request, arrival_s=arrival_s, sink=box.append)

    def _stream(self, request: Request) -> Iterator[RequestOutput]:
        engine, box = self.engine, deque[RequestOutput]()
        try:
            self._add(request, engine.now(), box)
            while not (piece := self._next(box)).finished:
                yield piece
            yield piece
        finally:
            engine.end([request.request_id] if request.completions and request.num_running else [])

    def _next(self, box: deque[RequestOutput]) -> RequestOutput:
        """The next output for whoever waits at ``box``; steps, in turn with other threads, until there is one."""
        while not box:
            with self.engine.turns:
                if not box:
                    self.engine.advance()
        if isinstance(error := box[0].error, EngineDeadError):  # another thread stepped
            raise type(error)(str(error)) from error
        return box.popleft()


def _prepared_beside(engine: Engine, prepare: Callable[[], list[Request]]) -> list[Request]:
    """What ``prepare`` returns; in a thread where the engine runs something already, which goes on meanwhile."""
    if not engine.num_unfinished:
        return prepare()
    with closing(Preparing(engine)) as preparing:
        try:
            prepared = preparing.begin(None, prepare)
        except RuntimeError:  # the main script has come to its end: no executor takes anything
            return prepare()
        futures.wait([prepared], SOON_S)
        while engine.num_unfinished and not prepared.done():
            engine.advance()
        return prepared.result()


def _close_at_exit(llm: LLM) -> None:
    """A program that ends without :meth:`LLM.close` closes all the same, unless it ends with an error."""
    if getattr(sys, "last_value", None) is None:
        llm.close()


def _present(requests: Sequence[Request], outputs: Sequence[RequestOutput]) -> list[RequestOutput]:
    """The outputs that there are, in the order of the requests."""
    found = {output.request_id: output for output in outputs}
    return [found[request.request_id] for request in requests if request.request_id in found]


def _progress(*, enabled: bool) -> Progress:
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = Console(stderr=True)
    return Progress(*columns, console=console, disable=not (enabled and console.is_terminal))
