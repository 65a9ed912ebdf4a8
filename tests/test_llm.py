"""The front door: every way to ask, what comes back, and that nothing is left behind."""

import gc
import io
import json
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from types import FrameType
from typing import Any, Self
from unittest.mock import Mock

import numpy as np
import pytest
import torch

from medha import LLM, SLO, RequestOutput, SamplingParams
from medha.errors import DeadlineError, EngineDeadError, UnsupportedFeatureError, ValidationError
from medha.outputs import CompletionOutput
from tests.commands import LIMIT_S, run_python, wait_until
from tests.serving import ANSWER, GREEDY, Model, Tokens, assert_empty, fail_in_run, finish, greedy_of, question

TEXTS = ["Hello", "It was a dark and stormy night", "x", "The vault code of Priya is"]


def small(model: Model | Path, **options: Any) -> LLM:
    """An LLM with little memory, which reads in small chunks."""
    sizes = {"num_kv_blocks": 32, "block_size": 64, "chunk_size": 64, "max_batch_tokens": 128}
    return LLM(model.folder if isinstance(model, Model) else model, **{"quantum_s": 0.25, **sizes, **options})


@pytest.fixture(scope="module")
def llm(bytes_model: Model) -> Iterator[LLM]:
    with small(bytes_model) as llm:
        yield llm


@pytest.fixture(scope="module")
def expected(bytes_model: Model) -> Tokens:
    """Greedy tokens of transformers for TEXTS, clear of rounding."""
    return greedy_of(bytes_model.reference, [list(text.encode()) for text in TEXTS], 16)


def token_ids(outputs: list[RequestOutput]) -> Tokens:
    return [output.outputs[0].token_ids for output in outputs]


def streamed(pieces: Iterable[RequestOutput]) -> list[int]:
    """The tokens of a stream's pieces, one after the other."""
    return [token for piece in pieces for token in piece.outputs[0].token_ids]


# -- generate --------------------------------------------------------------------------------------------------


def test_the_first_five_minutes(needle: Model, capfd: pytest.CaptureFixture[str]) -> None:
    with LLM(str(needle.folder), num_kv_blocks=8) as llm:
        (output,) = llm.generate(question())
        assert llm.generate([]) == []
        assert llm.get_tokenizer().encode("ab") == [97, 98]
    assert capfd.readouterr() == ("", "")
    assert output.finished
    assert (output.prompt, output.prompt_token_ids) == (question(), list(question().encode()))
    assert (output.error, output.num_cached_tokens) == (None, 0)
    assert output.outputs == [CompletionOutput(0, ANSWER, list((ANSWER + "\n").encode()), "stop")]
    metrics = output.metrics
    assert (metrics.num_prompt_tokens, metrics.num_output_tokens) == (200, 13)
    assert metrics.ttft > 0 and metrics.tpot > 0


def test_many_prompts_come_back_in_order(llm: LLM, expected: Tokens) -> None:
    params = [SamplingParams(temperature=0.0, max_tokens=n) for n in (16, 1, 9, 4)]
    outputs = llm.generate(TEXTS, params)
    assert token_ids(outputs) == [tokens[: p.max_tokens] for tokens, p in zip(expected, params, strict=True)]
    assert [output.prompt for output in outputs] == TEXTS
    assert len({output.request_id for output in outputs}) == len(TEXTS)
    assert token_ids(llm.generate(tuple(TEXTS), tuple(params))) == token_ids(outputs)
    outputs = llm.generate(TEXTS, GREEDY, slo=SLO(ttft_s=1e9, tpot_s=1e9))
    assert token_ids(outputs) == expected
    assert [output.metrics.met_slo for output in outputs] == [True] * len(TEXTS)
    assert_empty(llm.engine)


IDS = list(TEXTS[1].encode())
FORMS: dict[str, Any] = {
    "text": TEXTS[1],
    "texts": [TEXTS[1]],
    "ids": IDS,
    "tuple of ids": tuple(IDS),
    "lists of ids": [IDS],
    "array": np.array(IDS, dtype=np.int32),
    "array of two axes": np.array([IDS]),
    "tensor": torch.tensor(IDS),
    "arrays": [np.array(IDS)],
    "prompt": {"prompt": TEXTS[1]},
    "prompt_token_ids": {"prompt_token_ids": IDS},
    "prompt_token_ids array": {"prompt_token_ids": np.array(IDS)},
    "others are None": {"prompt": None, "prompt_token_ids": IDS, "messages": None},
    "mappings": [{"prompt": TEXTS[1]}],
    "mixed": [TEXTS[0], IDS, {"prompt": TEXTS[2]}, {"prompt_token_ids": list(TEXTS[3].encode())}],
}


@pytest.mark.parametrize("form", FORMS)
def test_one_prompt_in_every_form(llm: LLM, expected: Tokens, form: str) -> None:
    outputs = llm.generate(FORMS[form], GREEDY)
    assert token_ids(outputs) == (expected if form == "mixed" else [expected[1]])
    (one,) = outputs[1:2] or outputs
    given_as_text = form in ("text", "texts", "prompt", "mappings")
    assert (one.prompt_token_ids, one.prompt) == (IDS, TEXTS[1] if given_as_text else None)


def test_chat(llm: LLM) -> None:
    conversation = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    rendered = "system: Be brief.\nuser: Hi\nassistant:"
    (truth,) = llm.generate(rendered, GREEDY)
    for outputs in (
        llm.chat(conversation, GREEDY),
        llm.chat([conversation], [GREEDY], slo=[None], use_tqdm=False),
        llm.generate({"messages": conversation}, GREEDY),
        llm.generate([{"messages": conversation}], GREEDY),
    ):
        assert token_ids(outputs) == token_ids([truth])
        assert (outputs[0].prompt, outputs[0].prompt_token_ids) == (rendered, truth.prompt_token_ids)
    first, _ = llm.chat([conversation, [{"role": "user", "content": "x"}]], GREEDY)
    assert first.outputs == outputs[0].outputs


def test_requests_without_a_seed_repeat_with_the_seed_of_the_llm(bytes_model: Model) -> None:
    def run(seed: int) -> Tokens:
        with small(bytes_model, seed=seed) as llm:
            return token_ids(llm.generate([TEXTS[0]] * 3) + llm.generate([TEXTS[0]]))

    first = run(0)
    assert len({tuple(tokens) for tokens in first}) == 4
    assert run(0) == first
    assert run(1) != first


def test_the_default_device_is_the_programs_own(bytes_model: Model) -> None:
    """A tensor of ours that landed there would hold nothing."""
    params = [SamplingParams(seed=1, top_p=0.5), SamplingParams(seed=1, repetition_penalty=1.5, logit_bias={65: 9.0})]

    def run() -> Tokens:
        with small(bytes_model) as llm:
            return token_ids(llm.generate(TEXTS[:2], params))

    expected = run()
    torch.set_default_device("meta")
    assert run() == expected


def test_chat_options_reach_the_template(folder: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.content }}{% endfor %}|{{ tools | tojson }}|{{ enable_thinking }}|{{ level }}"
        "{% if add_generation_prompt %}|assistant:{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    conversation = [{"role": "user", "content": "Hi"}]
    one_token = SamplingParams(temperature=0.0, max_tokens=1)
    with small(folder) as llm:
        for options, rendered in (
            ({}, "Hi|null|||assistant:"),
            ({"add_generation_prompt": False}, "Hi|null||"),
            ({"tools": [{"name": "f"}]}, 'Hi|[{"name": "f"}]|||assistant:'),
            ({"chat_template_kwargs": {"enable_thinking": False, "level": 3}}, "Hi|null|False|3|assistant:"),
            ({"chat_template_kwargs": {"add_generation_prompt": False}}, "Hi|null||"),
        ):
            (output,) = llm.chat(conversation, one_token, **options)
            assert output.prompt == rendered
            assert output.prompt_token_ids == list(rendered.encode())
            assert llm.generate({"messages": conversation, **options}, one_token)[0].prompt == rendered
        with pytest.raises(ValidationError, match=r"^chat_template_kwargs=5; accepted: an object") as caught:
            llm.chat(conversation, chat_template_kwargs=5)  # type: ignore[arg-type]
        assert caught.value.param == "chat_template_kwargs"
        with pytest.raises(ValidationError, match=r"^add_generation_prompt='no'; accepted: true or false"):
            llm.chat(conversation, add_generation_prompt="no")  # type: ignore[arg-type]


def test_a_refused_request_leaves_the_others_be(needle: Model) -> None:
    with small(needle, admission="refuse") as llm:
        slo = [None, SLO(ttft_s=1e-9), SLO(ttft_s=600.0)]
        outputs = llm.generate([question()] * 3, slo=slo)
        assert_empty(llm.engine)
    assert [output.outputs[0].text for output in outputs] == [ANSWER, None, ANSWER]
    assert [type(output.error) for output in outputs] == [type(None), DeadlineError, type(None)]
    assert [output.metrics.met_slo for output in outputs] == [None, False, True]
    refused = outputs[1]
    assert (refused.finished, refused.prompt, refused.outputs[0].finish_reason) == (True, question(), "error")
    assert refused.metrics.e2e is not None and refused.metrics.ttft is None


def test_progress_bar(llm: LLM, expected: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal; that stderr is no file does no harm."""
    monkeypatch.setattr(sys, "stderr", screen := io.StringIO())
    monkeypatch.setattr(screen, "isatty", lambda: True)
    llm.generate(TEXTS, GREEDY, use_tqdm=False)
    assert "Processed prompts" not in screen.getvalue()
    llm.generate(TEXTS, GREEDY)
    assert "Processed prompts" in screen.getvalue() and "4/4" in screen.getvalue()
    (closed := io.StringIO()).close()
    for stderr in (None, closed, object()):
        monkeypatch.setattr(sys, "stderr", stderr)
        assert token_ids(llm.generate(TEXTS, GREEDY)) == expected


@pytest.mark.parametrize(
    ("generation", "defaults"),
    [
        (None, {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}),
        ({"min_p": 0.1, "repetition_penalty": 1.2}, {"min_p": 0.1, "repetition_penalty": 1.2, "temperature": 1.0}),
        ({"max_new_tokens": 9, "top_p": 0.5}, {"max_tokens": 9, "top_p": 0.5}),
    ],
)
def test_default_sampling_params(folder: Path, generation: dict[str, Any] | None, defaults: dict[str, Any]) -> None:
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    with small(folder) as llm:
        params = llm.get_default_sampling_params()
        assert {name: getattr(params, name) for name in defaults} == defaults
        silent, others = {"max_tokens": params.max_tokens}, {"temperature": 1.9, "top_p": 1, "top_k": 0}
        given = [SamplingParams(seed=3, **silent | its) for its in ({}, defaults, others)]
        implicit, explicit, other = llm.generate([TEXTS[0]] * 3, given)
        assert len(token_ids(llm.generate(TEXTS[0]))[0]) == params.max_tokens == defaults.get("max_tokens", 16)
    assert implicit.outputs == explicit.outputs
    assert implicit.outputs != other.outputs


# -- stream ----------------------------------------------------------------------------------------------------


def test_the_last_token_of_a_character_has_its_text(needle: Model) -> None:
    """It has several, and the model says what was in the prompt; the text is what its tokens' texts are together."""
    with small(needle) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=12, logprobs=0)
        answer = llm.generate("ABCDEFGH漢字🙂ok. end\n zz ABCDEFGH", params)[0].outputs[0]
    texts = [next(iter(step.values())).decoded_token for step in answer.logprobs or ()]
    assert texts == ["", "", "漢", "", "", "字", "", "", "", "🙂", "o", "k"] and answer.text == "漢字🙂ok"


def test_stream(needle: Model) -> None:
    params = SamplingParams(stop="-am")
    with small(needle) as llm:
        (whole,) = llm.generate(question(), params)
        stream = llm.stream(question(), params, slo=SLO(ttft_s=1e9), priority="high", tenant="a")
        first, (live,) = next(stream), llm.engine.live.values()
        pieces = [first, *stream]
        assert_empty(llm.engine)
    assert (live.priority, live.tenant) == ("high", "a")
    assert "".join(piece.outputs[0].text or "" for piece in pieces) == whole.outputs[0].text == " 7429"
    assert streamed(pieces) == whole.outputs[0].token_ids
    assert [piece.finished for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].outputs[0].stop_reason == "-am"
    assert pieces[-1].metrics.met_slo is True


@pytest.mark.parametrize("depth", [1, 4])
@pytest.mark.parametrize("taken", [0, 5])
def test_leaving_a_stream_early_aborts(bytes_model: Model, expected: Tokens, depth: int, taken: int) -> None:
    with small(bytes_model, depth=depth) as llm:
        stream = llm.stream(TEXTS[1], GREEDY)
        assert llm.engine.num_unfinished == 0
        assert streamed(islice(stream, taken)) == expected[1][:taken]
        assert llm.engine.num_unfinished == (taken > 0)
        stream.close()  # type: ignore[attr-defined]
        assert_empty(llm.engine)
        assert token_ids(llm.generate(TEXTS, GREEDY)) == expected


def test_a_stream_takes_one_prompt(llm: LLM) -> None:
    for prompts in (["a"], ("a", "b"), [[1, 2]], [{"prompt": "a"}]):
        with pytest.raises(ValidationError, match=rf"^stream takes one prompt, and this is a list of {len(prompts)};"):
            llm.stream(prompts)


def test_a_stream_goes_on_while_generate_tokenises(llm: LLM, expected: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose TTFT includes that."""
    stream = llm.stream(TEXTS[0], GREEDY)
    first = next(stream)
    tokenizer, (live,) = llm.engine.tokenizer, llm.engine.live.values()
    encode, threads, begun_s = tokenizer.encode_array, [], []

    def patient(text: str, **options: Any) -> Any:
        threads.append(threading.get_ident())
        begun_s.append(llm.engine.now())
        wait_until(lambda: len(live.completions[0].token_ids) >= 9, told=lambda: "the stream stands still")
        return encode(text, **options)

    monkeypatch.setattr(tokenizer, "encode_array", patient)
    outputs = llm.generate(TEXTS[1], GREEDY)
    assert token_ids(outputs) == [expected[1]]
    assert outputs[0].metrics.arrival < begun_s[0]
    assert threads and threading.get_ident() not in threads
    assert streamed([first, *stream]) == expected[0]


def test_requests_of_ones_own_go_on_beside_others(bytes_model: Model, expected: Tokens) -> None:
    """Outputs go to whoever they belong to, whoever steps. The ids of generate's requests begin at 0, too."""
    with small(bytes_model) as llm:
        prepared = llm.stream(TEXTS[2], GREEDY)
        for own in "01":
            llm.engine.add_request(own, TEXTS[0], GREEDY)
        llm.engine.abort("1")
        assert streamed(prepared) == expected[2]
        stream = llm.stream(TEXTS[1], GREEDY)
        first = next(stream)
        assert token_ids(llm.generate(TEXTS, GREEDY)) == expected
        assert streamed([first, *stream]) == expected[1]
        stream = llm.stream(TEXTS[1], GREEDY)
        ended = next(piece for piece in stream if piece.finished)
        llm.engine.add_request(ended.request_id, TEXTS[0], GREEDY)
        assert next(stream, None) is None
        mine = finish(llm.engine)
    assert token_ids([mine.pop(ended.request_id)]) == expected[:1]
    ends = {name: (output.outputs[0].finish_reason, output.outputs[0].token_ids) for name, output in mine.items()}
    assert ends == {"0": ("length", expected[0]), "1": ("abort", [])}


def test_a_step_within_a_step_is_refused(llm: LLM, expected: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    def nested(*_: object) -> None:
        with pytest.raises(UnsupportedFeatureError, match="within a step, as in on_step; accepted: add_req"):
            llm.generate(TEXTS, GREEDY)

    monkeypatch.setattr(llm.engine, "on_step", nested)
    assert token_ids(llm.generate(TEXTS, GREEDY)) == expected
    assert_empty(llm.engine)


# -- threads ---------------------------------------------------------------------------------------------------


@pytest.fixture
def _restless() -> None:
    """Threads give way to each other at almost any bytecode."""
    sys.setswitchinterval(1e-5)


def in_threads(*uses: Callable[[], Any]) -> list[Any]:
    """What each use returns or raises, all run at once."""
    barrier = threading.Barrier(len(uses))

    def run(use: Callable[[], Any]) -> Any:
        barrier.wait()
        return use()

    with ThreadPoolExecutor(len(uses)) as pool:
        futures = [pool.submit(run, use) for use in uses]
        return [future.exception(LIMIT_S) or future.result() for future in futures]


@pytest.mark.usefixtures("_restless")
def test_threads_that_generate_and_stream_get_their_own(llm: LLM, expected: Tokens) -> None:
    def generate() -> Tokens:
        return token_ids(llm.generate(TEXTS, GREEDY))

    def stream(i: int) -> list[int]:
        return streamed(llm.stream(TEXTS[i], GREEDY))

    for _ in range(5):
        results = in_threads(generate, lambda: stream(0), generate, lambda: stream(1), lambda: stream(1), generate)
        assert results == [expected, expected[0], expected, expected[1], expected[1], expected]
    assert_empty(llm.engine)


OUTLIVING = r"""
import sys, threading, time
from concurrent.futures import ThreadPoolExecutor, thread
from medha import LLM, SamplingParams
llm = LLM(sys.argv[1], num_kv_blocks=8, block_size=64)
def work(text):
    while not thread._shutdown:
        time.sleep(0.001)
    both.wait()
    for _ in range(3):
        (output,) = llm.generate(text, SamplingParams(temperature=0.0, max_tokens=16))
        print(f"{output.outputs[0].token_ids}\n", end="")
both = threading.Barrier(2)
threading.Thread(target=work, args=(sys.argv[2],)).start()
ThreadPoolExecutor(1).submit(work, sys.argv[3])
"""


def test_threads_that_outlive_the_main_script(bytes_model: Model, expected: Tokens) -> None:
    """One of its own and one of an executor's, which the interpreter waits for in different ways."""
    done = run_python("-c", OUTLIVING, bytes_model.folder, *TEXTS[:2])
    assert sorted(done.stdout.splitlines()) == sorted(map(str, expected[:2] * 3)), done.stderr


@pytest.mark.usefixtures("_restless")
def test_threads_that_add_and_abort_beside_one_that_steps(llm: LLM, expected: Tokens) -> None:
    engine, done, outputs = llm.engine, threading.Event(), []

    def add(name: str) -> None:
        for i in range(30):
            engine.add_request(f"{name}{i}", TEXTS[i % 4], GREEDY)
            if i % 3 == 0:
                engine.abort(f"{name}{i}")

    def step() -> None:
        while engine.has_unfinished or not done.is_set():
            outputs.extend(engine.step())

    stepping = threading.Thread(target=step, daemon=True)
    stepping.start()
    uses = (lambda: add("a"), lambda: add("b"), lambda: token_ids(llm.generate(TEXTS, GREEDY)))
    assert in_threads(*uses) == [None, None, expected]
    done.set()
    stepping.join(300)
    ended = [output for output in outputs if output.finished]
    assert sorted(output.request_id for output in ended) == sorted(f"{name}{i}" for name in "ab" for i in range(30))
    for output in ended:
        tokens, reason = output.outputs[0].token_ids, output.outputs[0].finish_reason
        assert tokens == expected[int(output.request_id[1:]) % 4][: len(tokens)]
        assert reason == ("abort" if int(output.request_id[1:]) % 3 == 0 and len(tokens) < 16 else "length")
    assert_empty(engine)


def test_every_thread_hears_of_the_engines_death(bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """All of them have requests in it then: none ends before."""
    long = SamplingParams(temperature=0.0, max_tokens=300, ignore_eos=True)
    with small(bytes_model) as llm:
        run = llm.engine.runner.run

        def failing(step: Any) -> Any:
            time.sleep(0.01)
            if llm.engine.num_unfinished == 5:
                raise RuntimeError("lost")
            return run(step)

        monkeypatch.setattr(llm.engine.runner, "run", failing)
        errors = in_threads(
            lambda: llm.generate(TEXTS[:2], long),
            lambda: llm.generate(TEXTS[2:], long),
            lambda: list(llm.stream(TEXTS[0], long)),
        )
    for error, texts in zip(errors, (TEXTS[:2], TEXTS[2:], []), strict=True):
        assert isinstance(error, EngineDeadError), error
        assert "a step failed: RuntimeError: lost" in str(error)
        assert [output.prompt for output in error.outputs] == texts


# -- life and death --------------------------------------------------------------------------------------------


def test_use_after_close(needle: Model) -> None:
    """The processes for text end; a tokenizer that is kept starts another one where it needs it."""
    llm = small(needle)
    open_stream, tokenizer = llm.stream(question()), llm.get_tokenizer()
    next(open_stream)
    assert tokenizer is not None
    num_tokens = len(tokenizer.encode("x" * 200_000))
    child = tokenizer._encoder.child._process
    assert child is not None and child.poll() is None
    with pytest.raises(ZeroDivisionError), llm:
        _ = 1 / 0
    llm.close()
    assert child.returncode == -signal.SIGKILL
    uses: list[Callable[[], Any]] = [lambda: llm.generate("x"), lambda: llm.chat([{"role": "user", "content": "x"}])]
    uses += [lambda: llm.stream("x"), lambda: llm.engine, llm.get_tokenizer, llm.get_default_sampling_params]
    for use in (*uses, lambda: next(open_stream)):
        with pytest.raises(EngineDeadError, match="this LLM is closed"):
            use()
    assert len(tokenizer.encode("x" * 200_000)) == num_tokens


def test_close_frees_everything(needle: Model, tmp_path: Path) -> None:
    def count() -> tuple[int, int, int]:
        return len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task"))

    most: list[tuple[int, int, int]] = []
    for i in range(4):
        llm = small(needle, journal=tmp_path / "run.journal")
        model, pool = weakref.ref(llm.engine.runner.model), weakref.ref(llm.engine.runner.cache)
        assert llm.generate(question())[0].outputs[0].text == ANSWER
        if i % 2:
            llm.close()
        else:
            del llm
        gc.collect()
        assert model() is pool() is None
        most.append(count())
        # A thread that has been joined may be there yet for the kernel.
        wait_until(lambda: all(now <= before for now, before in zip(count(), most[0], strict=True)))


# -- failures --------------------------------------------------------------------------------------------------


PARTIAL = [SamplingParams(temperature=0.0, max_tokens=n) for n in (16, 3, 16, 16)]


def check_partial(outputs: list[RequestOutput], expected: Tokens, reason: str) -> None:
    """Of four requests the second was done, and the others had four tokens."""
    assert [output.prompt for output in outputs] == TEXTS
    assert [output.outputs[0].finish_reason for output in outputs] == [reason, "length", reason, reason]
    assert token_ids(outputs) == [tokens[:n] for tokens, n in zip(expected, [4, 3, 4, 4], strict=True)]


def test_interrupt(llm: LLM, expected: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    fail_in_run(llm.engine, monkeypatch, at=4, error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(TEXTS, PARTIAL)
    check_partial(caught.value.outputs, expected, "abort")  # type: ignore[attr-defined]
    assert_empty(llm.engine)
    monkeypatch.setattr(llm.engine, "prepare", Mock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt) as caught:
        llm.generate(TEXTS)
    assert caught.value.outputs == []  # type: ignore[attr-defined]
    monkeypatch.undo()
    assert token_ids(llm.generate(TEXTS, GREEDY)) == expected


class InterruptAtLine:
    """Makes a call, which raises, before the n-th line of medha that runs inside a method of the engine."""

    def __init__(self, method: str, number: int, interrupt: Callable[[], Any]) -> None:
        self.method = method
        self.left = number
        self.interrupt = interrupt
        self.is_inside = False

    def __enter__(self) -> Self:
        sys.settrace(self)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event in ("call", "return") and frame.f_code.co_qualname == self.method:
            self.is_inside = event == "call"
        if not self.is_inside or f"{os.sep}medha{os.sep}" not in frame.f_code.co_filename:
            return None
        if event == "line" and self.is_inside:
            self.left -= 1
            if self.left == 0:
                sys.settrace(None)  # what comes now runs at full speed
                self.interrupt()
        return self


class TooLateError(Exception):
    """What a program's own signal handler raises."""


def too_late(*_: object) -> None:
    raise TooLateError


@pytest.fixture(params=[signal.default_int_handler, too_late])
def interrupt(request: pytest.FixtureRequest) -> Callable[[], Any]:
    """Interrupts as Ctrl-C does, or with an Exception."""
    signal.signal(signal.SIGUSR1, request.param)
    return partial(signal.raise_signal, signal.SIGUSR1)


@pytest.mark.parametrize("number", range(1, 15))
def test_an_interrupt_tears_no_delta(needle: Model, interrupt: Callable[[], Any], number: int) -> None:
    engine, outputs = needle.engine(), list[RequestOutput]()
    request = engine.prepare("a", question(), SamplingParams(temperature=0.0, max_tokens=4, output_kind="delta"))
    engine.add_prepared(request, arrival_s=0.0, sink=outputs.append)
    with suppress(KeyboardInterrupt, TooLateError), InterruptAtLine("Completion.output", number, interrupt):
        while request.num_running:
            engine.advance()
    deltas = [output.outputs[0] for output in outputs]
    tokens = [token for delta in deltas for token in delta.token_ids]
    assert outputs[-1].finished
    assert "".join(delta.text or "" for delta in deltas) == bytes(tokens).decode()


@pytest.mark.parametrize(("method", "depth"), [("advance", 1), ("advance", 2), ("add_prepared", 1)])
def test_interrupt_at_any_line(
    bytes_model: Model, expected: Tokens, interrupt: Callable[[], Any], method: str, depth: int
) -> None:
    """Half-done changes of the scheduler's or a request's state must not outlive the interrupt.

    Each of the first lines at one depth or the other, by turns: the same lines of a step run at both."""
    texts, params = TEXTS[:2], SamplingParams(temperature=0.0, max_tokens=2, stop="none of these bytes")
    with small(bytes_model, depth=depth, chunk_size=16) as llm:
        number, num_interrupts = depth, 0
        while True:
            tracer = InterruptAtLine(f"Engine.{method}", number, interrupt)
            number += 2 if number < 300 else 53
            try:
                with tracer:
                    llm.generate(texts, params)
            except (KeyboardInterrupt, TooLateError) as error:
                num_interrupts += 1
                for output in error.outputs:  # type: ignore[union-attr]
                    tokens = output.outputs[0].token_ids
                    assert tokens == expected[TEXTS.index(output.prompt)][: len(tokens)]
            assert_empty(llm.engine)
            if tracer.left > 0:
                break
            if number % 5 == 0:
                assert token_ids(llm.generate(texts, params)) == [tokens[:2] for tokens in expected[:2]]
    assert num_interrupts > (200 if method == "advance" else 100)


def test_a_second_interrupt_at_any_line_of_what_follows_the_first(
    bytes_model: Model, expected: Tokens, interrupt: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    params, number = SamplingParams(temperature=0.0, max_tokens=2), 1
    tracer = InterruptAtLine("", 0, interrupt)
    with small(bytes_model, chunk_size=16) as llm:
        while tracer.left <= 0:
            tracer = InterruptAtLine("Engine.abandon", number, interrupt)
            number += 1 + number // 6
            with monkeypatch.context() as patch:
                fail_in_run(llm.engine, patch, at=1, error=KeyboardInterrupt())
                with pytest.raises((KeyboardInterrupt, TooLateError)), tracer:
                    llm.generate(TEXTS, params)
            assert token_ids(llm.generate(TEXTS, params)) == [tokens[:2] for tokens in expected]
            assert_empty(llm.engine)
    assert number > 1000


@pytest.mark.parametrize("number", range(1, 8))
def test_an_interrupt_while_another_stream_ends(llm: LLM, interrupt: Callable[[], Any], number: int) -> None:
    other = llm.stream(TEXTS[1], SamplingParams(temperature=0.0, max_tokens=3))
    next(other)
    with pytest.raises((KeyboardInterrupt, TooLateError)), InterruptAtLine("Completion.finish", number, interrupt):
        list(llm.stream(TEXTS[0], GREEDY))
    assert list(other)[-1].finished
    assert_empty(llm.engine)


@pytest.mark.parametrize("where", ["scheduler.add", "scheduler.complete", "runner.open"])
def test_a_stream_that_is_collected_in_the_middle_of_a_method(
    bytes_model: Model, expected: Tokens, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Garbage is collected anywhere, with it a stream that an error has left in a circle of frames."""
    part, name = where.split(".")
    with small(bytes_model) as llm:
        streams = [llm.stream(text, GREEDY) for text in TEXTS]
        assert all(map(next, streams))
        method = getattr(getattr(llm.engine, part), name)

        def collecting(*args: Any, **options: Any) -> Any:
            result = method(*args, **options)
            while streams:
                streams.pop().close()  # type: ignore[attr-defined]
            return result

        monkeypatch.setattr(getattr(llm.engine, part), name, collecting)
        assert token_ids(llm.generate(TEXTS, GREEDY)) == expected
        assert not streams
        assert_empty(llm.engine)


def test_a_step_that_fails(bytes_model: Model, expected: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    with small(bytes_model) as llm:
        fail_in_run(llm.engine, monkeypatch, at=4, error=RuntimeError("lost"))
        with pytest.raises(EngineDeadError, match="a step failed: RuntimeError: lost") as caught:
            llm.generate(TEXTS, PARTIAL)
        check_partial(caught.value.outputs, expected, "error")
        assert isinstance(caught.value.__cause__, RuntimeError)
        dead = caught.value.__cause__  # the engine's own error, and whose cause is that of the step
        assert isinstance(dead, EngineDeadError) and str(dead.__cause__) == "lost"
        assert [output.error for output in caught.value.outputs] == [dead, None, dead, dead]
        for use in (lambda: llm.generate(TEXTS), lambda: llm.stream("x")):
            with pytest.raises(EngineDeadError) as again:
                use()
            assert again.value is dead
