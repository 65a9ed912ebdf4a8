"""The front door: load a model, give it prompts, get text.

from medha import LLM, SamplingParams
with LLM("path/to/model") as llm:
    for output in llm.generate(["Hello"], SamplingParams(temperature=0.0, max_tokens=32)):
        print(output.outputs[0].text)
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any

from medha.build import build_engine
from medha.config import EngineConfig
from medha.engine import Engine, PreparedRequest, Prompt
from medha.errors import EngineDeadError, ValidationError
from medha.request import SLO, OutputKind, RequestOutput, SamplingParams
from medha.text import Tokenizer
from medha.timeline import Timeline


class LLM:
    """One model, ready to serve.

    Args:
        model: local Hugging Face folder, or hub id.
        timeline: records what runs, if given.
        options: any option of :class:`medha.config.EngineConfig` by its flat name, for example ``dtype``, ``device``,
            ``max_model_len``, ``max_num_seqs``, ``max_batch_tokens``, ``chunk_size``, ``num_kv_blocks``,
            ``kv_memory`` (bytes), ``block_size``, ``rope_scaling``, ``load_format``, ``seed``.

    Raises:
        ConfigError: an option or the model folder is wrong; the subclass says what.
    """

    def __init__(self, model: str, *, timeline: Timeline | None = None, **options: Any) -> None:
        self.config = EngineConfig.from_flat(str(model), **options)
        self._engine: Engine | None = build_engine(self.config, timeline=timeline)
        self._ids = itertools.count()

    @property
    def engine(self) -> Engine:
        """The engine behind; drive it yourself with ``add_request``, ``abort`` and ``step``."""
        if self._engine is None:
            raise EngineDeadError("this LLM is closed")
        return self._engine

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        slo: SLO | Sequence[SLO | None] | None = None,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """Complete prompts; all are checked before any is queued.

        Args:
            prompts: one prompt or several; each is text, token ids, or a mapping with ``prompt``,
                ``prompt_token_ids`` or ``messages``.
            sampling_params: for all, or one for each.
            slo: for all, or one for each.
            use_tqdm: show a progress bar on a terminal.

        Returns:
            One output a prompt, in the order of the prompts. A request that failed alone has ``error`` set.

        Raises:
            ValidationError: a prompt or parameter is wrong; ``index`` says which; nothing was queued.
            EngineDeadError: a step failed; ``outputs`` holds what was produced.
            KeyboardInterrupt: with ``outputs``: everything produced so far; the LLM can be used again.
        """
        requests = self._prepare(prompts, sampling_params, slo)
        engine = self.engine
        now = engine.now()
        done: dict[str, RequestOutput] = {}
        order = [request.request_id for request in requests]
        try:
            for request in requests:
                engine.add_prepared(request, arrival_s=now)
            with _Progress(len(requests), enabled=use_tqdm) as progress:
                while len(done) < len(requests):
                    finished = [output for output in engine.step() if output.finished]
                    done.update((output.request_id, output) for output in finished)
                    progress.advance(finished)
        except KeyboardInterrupt as interrupt:
            engine.abandon()
            done.update((output.request_id, output) for output in engine.step())
            interrupt.outputs = [done[i] for i in order if i in done]  # type: ignore[attr-defined]
            raise
        except EngineDeadError as error:
            done.update((output.request_id, output) for output in error.outputs)
            error.outputs = [done[i] for i in order if i in done]
            raise
        return [done[request_id] for request_id in order]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]] | Sequence[Sequence[Mapping[str, str]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        **options: Any,
    ) -> list[RequestOutput]:
        """Complete one conversation or several with the model's chat template; otherwise as :meth:`generate`."""
        conversations = [messages] if messages and isinstance(messages[0], Mapping) else messages
        return self.generate([{"messages": list(c)} for c in conversations], sampling_params, **options)

    def stream(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, *, slo: SLO | None = None
    ) -> Iterator[RequestOutput]:
        """Complete one prompt, yielding each new piece (``outputs[0].text`` and ``token_ids`` are the new part).

        Leaving the loop early aborts the request.
        """
        (request,) = self._prepare([prompt], sampling_params, slo, output_kind="delta")
        engine = self.engine
        engine.add_prepared(request, arrival_s=engine.now())
        try:
            finished = False
            while not finished:
                for output in engine.step():
                    if output.request_id == request.request_id:
                        finished = output.finished
                        yield output
        finally:
            engine.abort(request.request_id)

    def get_tokenizer(self) -> Tokenizer | None:
        """The tokenizer, or None when the folder has none."""
        return self.engine.tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """What a request without parameters uses: ``generation_config.json`` over the class defaults."""
        return SamplingParams().resolve(self.engine.limits.sampling_defaults)

    def close(self) -> None:
        """Drop the model and its memory; may be called twice."""
        self._engine = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        slo: SLO | Sequence[SLO | None] | None,
        *,
        output_kind: OutputKind = "final_only",
    ) -> list[PreparedRequest]:
        """Check everything; the first error names its index."""
        listed = _as_list(prompts)
        params = _spread("sampling_params", sampling_params, len(listed))
        slos = _spread("slo", slo, len(listed))
        requests = []
        for index, (prompt, one_params, one_slo) in enumerate(zip(listed, params, slos, strict=True)):
            try:
                request = self.engine.prepare(str(next(self._ids)), prompt, one_params, slo=one_slo)
            except ValidationError as error:
                if len(listed) > 1:
                    error.args = (f"prompt {index}: {error}",)
                error.index = index
                raise
            request.params = request.params.reported(output_kind)
            requests.append(request)
        return requests


def _as_list(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several as a list of prompts."""
    if isinstance(prompts, (str, Mapping)):
        return [prompts]
    if isinstance(prompts, Sequence) and prompts and all(type(token) is int for token in prompts):
        return [prompts]  # type: ignore[list-item]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise ValidationError(
            f"prompts of type {type(prompts).__name__}; accepted: a prompt or a list of prompts",
            param="prompts",
            value=prompts,
        )
    return list(prompts)  # type: ignore[arg-type]


def _spread(name: str, value: Any, count: int) -> list[Any]:
    """One value for all, or a list with one for each."""
    if not isinstance(value, (list, tuple)):
        return [value] * count
    if len(value) != count:
        raise ValidationError(
            f"{len(value)} {name} for {count} prompts; accepted: one, or {count}", param=name, value=value
        )
    return list(value)


class _Progress:
    """A progress bar over requests on stderr, when that is a terminal."""

    def __init__(self, total: int, *, enabled: bool) -> None:
        self._bar: Any = None
        if enabled and total and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("Processed prompts"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
                console=Console(stderr=True),
            )  # fmt: skip
            self._task = self._bar.add_task("", total=total)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *exc: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, finished: list[RequestOutput]) -> None:
        """Count finished requests."""
        if self._bar is not None and finished:
            self._bar.advance(self._task, len(finished))
