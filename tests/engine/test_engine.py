"""The engine's loop: outputs of every kind, ends of every kind, aborts, metrics, sampling, failures."""

import gc
import os
import weakref
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from medha.engine.arrivals import Joiner
from medha.engine.engine import Engine
from medha.errors import DeadlineError, EngineDeadError, NonFiniteLogitsError, ValidationError
from medha.outputs import RequestOutput
from medha.params import SLO, SamplingParams
from medha.sched.decision import Decision
from tests.checkpoints import random_prompt, reference_logits
from tests.engines import drained, poison
from tests.sched.virtual import make_predictor
from tests.serving import ANSWER, GREEDY, Model, assert_empty, fail_in_run, finish, greedy_of, question, serve_one
from tools.serve_overhead import make_engine

Tokens = list[list[int]]
NUM_TOKENS = 6
PROMPTS = [random_prompt(length, seed=4, vocab=256) for length in (40, 3, 70, 25)]
PARAMS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
SMALL = {"quantum_s": 0.25, "chunk_size": 16, "max_batch_tokens": 24, "block_size": 16}


@pytest.fixture(scope="module")
def expected(bytes_model: Model) -> Tokens:
    """Greedy tokens of transformers for PROMPTS, clear of rounding."""
    return greedy_of(bytes_model.reference, PROMPTS, NUM_TOKENS)


def add_all(engine: Engine, params: SamplingParams = PARAMS) -> None:
    for i, prompt in enumerate(PROMPTS):
        engine.add_request(str(i), prompt, params)


def step_forever(engine: Engine, outputs: dict[str, RequestOutput]) -> None:
    """Step until something is raised, keeping the latest output of each request."""
    while True:
        outputs.update((output.request_id, output) for output in engine.step())


# -- outputs ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_output_kinds(bytes_model: Model, expected: Tokens, depth: int) -> None:
    seen = defaultdict[tuple[str, str], list[RequestOutput]](list)
    kinds = ("cumulative", "delta", "final_only")
    for kind in kinds:
        engine = bytes_model.engine(depth=depth, **SMALL)
        add_all(engine, SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, output_kind=kind, logprobs=1))
        for output in drained(engine):
            seen[kind, output.request_id].append(output)
        assert_empty(engine)
    for i, tokens in enumerate(expected):
        text = bytes_model.tokenizer.decode(tokens)
        cumulative, delta, final = ([o.outputs[0] for o in seen[kind, str(i)]] for kind in kinds)
        assert [c.token_ids for c in cumulative] == [tokens[: n + 1] for n in range(NUM_TOKENS)]
        assert [c.token_ids for c in delta] == [[token] for token in tokens]
        assert cumulative[-1:] == final and final[0].token_ids == tokens
        assert final[0].text == "".join(c.text or "" for c in delta) == text
        assert all(text.startswith(c.text or "") for c in cumulative)
        assert [entry for c in delta for entry in c.logprobs or []] == final[0].logprobs
        assert [c.cumulative_logprob for c in delta] == [c.cumulative_logprob for c in cumulative]
        assert [c.finish_reason for c in cumulative] == [None] * (NUM_TOKENS - 1) + ["length"]
    for (_, i), outputs in seen.items():
        assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
        assert all((o.prompt, o.prompt_token_ids) == (None, PROMPTS[int(i)]) for o in outputs)


def test_the_tokens_of_an_output_do_not_change_later_and_the_callers_list_is_his_own(bytes_model: Model) -> None:
    engine, prompt = bytes_model.engine(), list(PROMPTS[0])
    assert not engine.has_unfinished and engine.num_unfinished == 0
    assert engine.step() == []
    engine.add_request("one", prompt, PARAMS)
    (first,) = engine.step()
    prompt.append(68)
    assert first.metrics.num_output_tokens == 1
    (second,) = engine.step()
    assert first.metrics is second.metrics and first.metrics.num_output_tokens == 2
    assert (len(first.outputs[0].token_ids), len(second.outputs[0].token_ids)) == (1, 2)
    assert first.prompt_token_ids == finish(engine)["one"].prompt_token_ids == PROMPTS[0]
    assert (first.prompt, first.error, first.num_cached_tokens) == (None, None, 0)


# -- several completions ---------------------------------------------------------------------------------------


DRAWN = SamplingParams(n=3, temperature=1.0, seed=7, max_tokens=NUM_TOKENS)


@pytest.fixture(scope="module")
def drawn(bytes_model: Model) -> Tokens:
    """What each completion of DRAWN draws alone."""
    params, engine = [replace(DRAWN, n=1, seed=seed) for seed in (7, 8, 9)], bytes_model.engine(**SMALL)
    tokens = [serve_one(engine, PROMPTS[0], one).outputs[0].token_ids for one in params]
    assert len(set(map(tuple, tokens))) == 3
    return tokens


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("kind", ["final_only", "cumulative", "delta"])
def test_n_completions_are_n_requests_under_one_id(bytes_model: Model, drawn: Tokens, kind: str, depth: int) -> None:
    engine, joiner = bytes_model.engine(**SMALL, depth=depth), Joiner()
    engine.add_request("a", PROMPTS[0], DRAWN.reported(kind))  # type: ignore[arg-type]
    engine.add_request("b", PROMPTS[1], PARAMS)
    assert engine.num_unfinished == 2
    outputs = [output for output in drained(engine) if output.request_id == "a"]
    assert_empty(engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert (len(outputs) == 1) == (kind == "final_only")
    whole = outputs[-1]
    if kind == "delta":
        whole = next(filter(None, map(joiner.add, outputs)))
        assert all(output.outputs for output in outputs)
        assert any(len(output.outputs) < 3 for output in outputs)
    assert [completion.index for completion in whole.outputs] == [0, 1, 2]
    assert [completion.token_ids for completion in whole.outputs] == drawn
    assert [completion.finish_reason for completion in whole.outputs] == ["length"] * 3
    assert [completion.text for completion in whole.outputs] == [bytes_model.tokenizer.decode(t) for t in drawn]


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_ends_all_completions(bytes_model: Model, expected: Tokens, drawn: Tokens, depth: int) -> None:
    engine = bytes_model.engine(**SMALL, depth=depth)
    engine.add_request("a", PROMPTS[0], replace(DRAWN, output_kind="delta"))
    engine.add_request("b", PROMPTS[1], PARAMS)
    joiner, outputs = Joiner(), list[RequestOutput]()
    while not any(output.request_id == "a" for output in outputs):
        outputs += engine.step()
    assert engine.explain("a").parts_s
    engine.abort("a")
    outputs += drained(engine)
    assert_empty(engine)
    whole = next(filter(None, map(joiner.add, [output for output in outputs if output.request_id == "a"])))
    assert [completion.finish_reason for completion in whole.outputs] == ["abort"] * 3
    for tokens, completion in zip(drawn, whole.outputs, strict=True):
        assert completion.token_ids == tokens[: len(completion.token_ids)]
    assert [output.outputs[0].token_ids for output in outputs if output.request_id == "b"][-1] == expected[1]


def test_bad_logits_end_one_completion(bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bytes_model.engine(block_size=16)
    poison(monkeypatch, seed=8, index=2, value=torch.nan)
    output = serve_one(engine, PROMPTS[0], DRAWN)
    assert [completion.finish_reason for completion in output.outputs] == ["length", "error", "length"]
    assert [len(completion.token_ids) for completion in output.outputs] == [NUM_TOKENS, 2, NUM_TOKENS]
    assert isinstance(output.error, NonFiniteLogitsError) and "'one[1]'" in str(output.error)


# -- ends ------------------------------------------------------------------------------------------------------

DOT, DASH, SEVEN, NEWLINE = (ord(c) for c in ".-7\n")
ENDS: dict[str, tuple[dict[str, Any], str, str, str | int | None]] = {
    "eos": ({}, ANSWER, "stop", None),
    "eos included": ({"include_stop_str_in_output": True}, ANSWER + "\n", "stop", None),
    "stop over tokens": ({"stop": "29-a"}, " 74", "stop", "29-a"),
    "stop included": ({"stop": "29-a", "include_stop_str_in_output": True}, " 7429-a", "stop", "29-a"),
    "first of several": ({"stop": ["zzz", "amber", "-"]}, " 7429", "stop", "-"),
    "stop at once": ({"stop": " "}, "", "stop", " "),
    "stop with the last token": ({"stop": "42", "max_tokens": 4}, " 7", "stop", "42"),
    "stop waits for a better match": ({"stop": ["29-x", "29"]}, " 74", "stop", "29"),
    "better match ended by length": ({"stop": ["29-x", "29"], "max_tokens": 6}, " 74", "stop", "29"),
    "stop begun, not ended": ({"stop": "29-x", "max_tokens": 6}, " 7429-", "length", None),
    "stop begun at eos": ({"stop": ".x"}, ANSWER, "stop", None),
    "eos before stop": ({"stop": "\n"}, ANSWER, "stop", None),
    "stop id": ({"stop_token_ids": [DASH]}, " 7429", "stop", DASH),
    "stop id included": ({"stop_token_ids": [DASH], "include_stop_str_in_output": True}, " 7429-", "stop", DASH),
    "stop id flushes text": ({"stop_token_ids": [DASH], "stop": "9-"}, " 7429", "stop", DASH),
    "stop id that is eos": ({"stop_token_ids": [NEWLINE]}, ANSWER, "stop", None),
    "length": ({"max_tokens": 4}, " 742", "length", None),
    "eos as last token": ({"max_tokens": len(ANSWER) + 1}, ANSWER, "stop", None),
    "ignore eos": ({"ignore_eos": True, "max_tokens": len(ANSWER) + 1}, ANSWER + "\n", "length", None),
    "ignore eos, stop id": ({"ignore_eos": True, "stop_token_ids": [NEWLINE]}, ANSWER, "stop", NEWLINE),
    "ignore eos, stop": ({"ignore_eos": True, "stop": "\n"}, ANSWER, "stop", "\n"),
    "stop not before min_tokens": ({"stop": "7", "min_tokens": 3}, ANSWER, "stop", None),
    "stop with the min_tokens-th": ({"stop": "4", "min_tokens": 3}, " 7", "stop", "4"),
}


@pytest.mark.parametrize("case", ENDS)
def test_ends(needle: Model, case: str) -> None:
    changes, text, finish_reason, stop_reason = ENDS[case]
    engine, params = needle.engine(eos=(1, NEWLINE)), SamplingParams(**{"temperature": 0.0, "max_tokens": 32} | changes)
    for kind in ("delta", "final_only"):
        engine.add_request(kind, question(), params.reported(kind))
    outputs = drained(engine)
    assert_empty(engine)
    for kind in ("delta", "final_only"):
        its = [output for output in outputs if output.request_id == kind]
        pieces = [output.outputs[0] for output in its]
        assert "".join(piece.text or "" for piece in pieces) == text
        assert (pieces[-1].finish_reason, pieces[-1].stop_reason) == (finish_reason, stop_reason)
        ids = [token for piece in pieces for token in piece.token_ids]
        assert ids == list((ANSWER + "\n").encode()[: len(ids)])
        assert its[-1].metrics.num_output_tokens == len(ids)


def test_max_tokens_is_capped_to_the_room(bytes_model: Model, caplog: pytest.LogCaptureFixture) -> None:
    engine = bytes_model.engine(max_model_len=45)
    with caplog.at_level("DEBUG", logger="medha"):
        completion = serve_one(engine, PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=100)).outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (5, "length")
    (told,) = (record for record in caplog.records if "max_tokens=100 is capped to 5" in record.getMessage())
    assert told.levelname == "DEBUG"  # it comes with each request


@pytest.mark.parametrize("with_tokenizer", [False, True])
def test_no_text(bytes_model: Model, expected: Tokens, with_tokenizer: bool) -> None:
    engine = bytes_model.engine(with_tokenizer=with_tokenizer)
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, logprobs=0, detokenize=not with_tokenizer)
    completion = serve_one(engine, PROMPTS[0], params).outputs[0]
    assert completion.text is None
    assert completion.token_ids == expected[0]
    assert len(completion.logprobs) == NUM_TOKENS
    if not with_tokenizer:
        assert {entry.decoded_token for step in completion.logprobs for entry in step.values()} == {None}


# -- aborts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{"depth": 1}, {"depth": 2}, {"depth": 4}, {"async_scheduling": True}], ids=str)
@pytest.mark.parametrize("victim", ["0", "2", "3"])
def test_abort_at_any_step_harms_nobody(bytes_model: Model, expected: Tokens, options: Any, victim: str) -> None:
    """Queued, between chunks, while decoding, and after the end; with one request waiting for a place."""
    reasons = set()
    for abort_step in range(0, 36, 3 if options == {"depth": 2} else 5):
        engine = bytes_model.engine(max_num_seqs=3, num_blocks=16, **options, **SMALL)
        add_all(engine)
        finished: dict[str, RequestOutput] = {}
        step = 0
        while engine.has_unfinished:
            if step == abort_step:
                engine.abort(victim)
                engine.abort(victim)
            finished.update((o.request_id, o) for o in engine.step() if o.finished)
            step += 1
        assert_empty(engine)
        for i, tokens in enumerate(expected):
            completion = finished[str(i)].outputs[0]
            if str(i) != victim or completion.finish_reason == "length":
                assert completion.token_ids == tokens
            else:
                assert completion.token_ids == tokens[: len(completion.token_ids)]
                assert finished[str(i)].error is None
        aborted = finished[victim].outputs[0]
        reasons.add((aborted.finish_reason, bool(aborted.token_ids)))
        if aborted.finish_reason == "length":  # later steps come behind the end as well
            break
    assert reasons >= {("abort", False), ("abort", True), ("length", True)}


def test_abort_flushes_text(needle: Model) -> None:
    engine = needle.engine(eos=(NEWLINE,))
    engine.add_request("one", question(), SamplingParams(temperature=0.0, max_tokens=32, stop="29-x"))
    while len(engine.step()[-1].outputs[0].token_ids) < 6:
        pass
    engine.abort("one")
    (output,) = engine.step()
    assert output.outputs[0].text == bytes(output.outputs[0].token_ids).decode() == " 7429-"


def test_id_of_an_aborted_request_may_be_used_while_it_is_in_flight(bytes_model: Model, expected: Tokens) -> None:
    engine = bytes_model.engine(depth=4, **SMALL)
    engine.add_request("0", PROMPTS[0], PARAMS)
    engine.step()
    engine.abort("0")
    engine.add_request("0", PROMPTS[2], PARAMS)
    outputs = [output.outputs[0] for output in drained(engine) if output.finished]
    assert [o.finish_reason for o in outputs] == ["abort", "length"]
    assert outputs[1].token_ids == expected[2]
    assert_empty(engine)


# -- times, admission and log-probabilities --------------------------------------------------------------------


def test_metrics(bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time_s=1000.0)  # which moves only when told
    engine = bytes_model.engine(clock=lambda: clock.time_s, chunk_size=16, max_batch_tokens=16, max_num_seqs=1)
    run = engine.runner.run

    def slow(step: Any) -> Any:
        clock.time_s += 1
        return run(step)

    monkeypatch.setattr(engine.runner, "run", slow)
    clock.time_s += 2
    assert engine.now() == 2.0
    engine.add_request("a", PROMPTS[0], SamplingParams(temperature=0.0, max_tokens=3), slo=SLO(ttft_s=4.0, tpot_s=0.5))
    engine.add_request("b", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=1), slo=SLO(ttft_s=0.5))
    engine.add_request("c", PROMPTS[1], SamplingParams(temperature=0.0, max_tokens=2), arrival_s=0.5)
    progress = []
    finished = {}
    while engine.has_unfinished:
        finished.update((o.request_id, o.metrics) for o in engine.step() if o.finished)
        progress.append(engine.prefills(min_tokens=4))
    assert progress[:3] == [[("a", 16, 40)], [("a", 32, 40)], []]
    a, b, c = finished["a"], finished["b"], finished["c"]
    assert (a.arrival, a.first_scheduled, a.first_token, a.finished) == (2.0, 2.0, 5.0, 7.0)
    assert (a.queue_time, a.ttft, a.tpot, a.e2e) == (0.0, 3.0, 1.0, 5.0)
    assert (a.num_chunks, a.num_prompt_tokens, a.num_output_tokens, a.num_preemptions) == (3, 40, 3, 0)
    assert a.met_slo is False
    assert (b.queue_time, b.ttft, b.tpot, b.e2e, b.num_chunks, b.met_slo) == (5.0, 6.0, None, 6.0, 1, False)
    assert (c.arrival, c.queue_time, c.ttft, c.tpot, c.met_slo) == (0.5, 7.5, 8.5, 1.0, None)


def test_an_explanation_comes_with_the_first_token_and_stays(bytes_model: Model) -> None:
    engine = bytes_model.engine(**SMALL)
    engine.add_request("0", PROMPTS[0], PARAMS)
    engine.step()
    assert engine.explain("0").text().startswith("0: no first token after ")
    outputs = [output for _ in range(2) for output in engine.step()]
    first = outputs[0].metrics.explanation
    assert first == engine.explain("0")
    assert first.has_first_token
    assert finish(engine)["0"].metrics.explanation == first
    with pytest.raises(ValidationError, match="request_id='0' is not running; accepted: an unfinished request"):
        engine.explain("0")


def test_a_request_that_cannot_be_in_time_is_refused(bytes_model: Model, expected: Tokens) -> None:
    """By a predictor that takes the model for a larger one: seconds for a prompt."""
    options = {"scheduler": "medha", "admission": "refuse", "max_batch_tokens": 64, "min_chunk": 16}
    engine = bytes_model.engine(block_size=16, predictor=make_predictor(max_tokens=64), **options)
    engine.add_request("fine", PROMPTS[1], PARAMS, slo=SLO(ttft_s=600.0))
    with pytest.raises(DeadlineError) as caught:
        engine.add_request("hopeless", PROMPTS[0], PARAMS, slo=SLO(ttft_s=1e-3))
    error = caught.value
    assert error.predicted_s > 1e-3
    assert (error.objective_s, error.param, error.value) == (1e-3, "slo.ttft_s", 1e-3)
    assert str(error).startswith(f"slo.ttft_s=0.001: its first token is predicted {error.predicted_s:.3f} s after its")
    assert (engine.num_unfinished, engine.scheduler.num_waiting) == (1, 1)
    with pytest.raises(DeadlineError):
        engine.add_request("late", PROMPTS[0], PARAMS, slo=SLO(ttft_s=50.0), arrival_s=engine.now() - 60.0)
    engine.add_request("hopeless", PROMPTS[0], PARAMS)
    outputs = finish(engine)
    assert {i: o.outputs[0].token_ids for i, o in outputs.items()} == {"fine": expected[1], "hopeless": expected[0]}


def test_what_fails_before_it_is_queued_leaves_nothing(bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = bytes_model.engine()
    monkeypatch.setattr("medha.engine.request.Detokenizer", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(ZeroDivisionError):
        engine.add_request("one", PROMPTS[0], PARAMS)
    monkeypatch.undo()
    assert_empty(engine)
    assert serve_one(engine, PROMPTS[0], PARAMS).finished


@pytest.mark.parametrize("temperature", [0.0, 2.0])
def test_logprobs_are_those_of_transformers(bytes_model: Model, temperature: float) -> None:
    """The drawn token comes first, whatever its rank, then the likeliest; with ``logprobs=0`` it alone."""
    params = SamplingParams(temperature=temperature, seed=5, max_tokens=8, logprobs=2)
    completion = serve_one(bytes_model.engine(), PROMPTS[1], params).outputs[0]
    tokens = completion.token_ids
    truth = reference_logits(bytes_model.reference, PROMPTS[1] + tokens)[len(PROMPTS[1]) - 1 : -1].log_softmax(dim=-1)
    assert len(completion.logprobs) == 8
    ranks = []
    for step, token, row in zip(completion.logprobs, tokens, truth, strict=True):
        ids = row.topk(2).indices.tolist()
        assert list(step) == [token, *(i for i in ids if i != token)]
        assert [entry.rank for entry in step.values()] == [int((row > row[i]).sum()) + 1 for i in step]
        assert [entry.logprob for entry in step.values()] == pytest.approx(row[list(step)].tolist(), abs=1e-4)
        for i, entry in step.items():  # of a part of a character see test_llm.py
            alone, whole = (bytes_model.tokenizer.decode([*had, i]) for had in ([], tokens[: len(ranks)]))
            its = entry.decoded_token
            assert its == alone or ("\ufffd" in alone and whole.strip("\ufffd").endswith(its))
        ranks.append(step[token].rank)
    assert max(ranks) > 2 if temperature else max(ranks) == 1
    assert completion.cumulative_logprob == pytest.approx(float(truth[range(8), tokens].sum()), abs=1e-3)
    alone = serve_one(bytes_model.engine(), PROMPTS[1], replace(params, logprobs=0)).outputs[0]
    assert [[*step] for step in alone.logprobs or []] == [[token] for token in tokens]


# -- failures --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("value", "is_async"), [(torch.nan, False), (torch.nan, True), (torch.inf, False)])
@pytest.mark.parametrize("index", [0, 2, NUM_TOKENS - 1])
def test_bad_logits_of_one(bytes_model: Model, expected: Tokens, index: int, value: float, is_async: bool) -> None:
    runs = []
    for victim in (2, -1):
        with pytest.MonkeyPatch.context() as patch:
            logits = poison(patch, seed=victim, index=index, value=value)
            engine = bytes_model.engine(**SMALL, async_scheduling=is_async)
            add_all(engine)
            runs.append((finish(engine), logits))
    (outputs, bad), (_, good) = runs
    failed = outputs["2"]
    assert failed.finished
    assert (failed.outputs[0].finish_reason, failed.outputs[0].token_ids) == ("error", expected[2][:index])
    assert isinstance(failed.error, NonFiniteLogitsError)
    assert f"request '2': the model returned NaN or infinite logits for token {index}" in str(failed.error)
    for i in (0, 1, 3):
        assert (outputs[str(i)].outputs[0].token_ids, outputs[str(i)].error) == (expected[i], None)
        if index == NUM_TOKENS - 1:  # the batches were the same in both runs
            assert all(torch.equal(a, b) for a, b in zip(bad[i], good[i], strict=True))
    assert serve_one(engine, PROMPTS[0], PARAMS).outputs[0].token_ids == expected[0]


@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("at", [0, 1, 6, 9])
def test_a_step_that_fails_ends_everything(
    bytes_model: Model, expected: Tokens, at: int, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bytes_model.engine(depth=depth, max_num_seqs=3, **SMALL)
    cause = RuntimeError("out of everything")
    fail_in_run(engine, monkeypatch, at=at, error=cause)
    add_all(engine)
    before: dict[str, RequestOutput] = {}
    with pytest.raises(EngineDeadError, match=r"^a step failed: RuntimeError: out of everything$") as caught:
        step_forever(engine, before)
    dead = caught.value
    assert dead.__cause__ is cause
    finished = {i for i, o in before.items() if o.finished}
    assert {o.request_id for o in dead.outputs} == {"0", "1", "2", "3"} - finished
    for output in dead.outputs:
        completion = output.outputs[0]
        assert (output.finished, output.error, completion.finish_reason) == (True, dead, "error")
        assert completion.token_ids == expected[int(output.request_id)][: len(completion.token_ids)]
        if output.request_id in before:
            assert completion.token_ids == before[output.request_id].outputs[0].token_ids
    assert not engine.has_unfinished
    for action in (engine.step, lambda: engine.add_request("new", [1]), lambda: engine.prepare("new", [1])):
        with pytest.raises(EngineDeadError) as again:
            action()
        assert again.value is dead
        assert len(again.traceback) <= 4  # of this call alone
    engine.abort("0")
    engine.abandon()


def test_death_by_the_tokenizer_still_returns_the_tokens(needle: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = needle.engine(eos=(NEWLINE,))
    for i in "ab":
        engine.add_request(i, question(), GREEDY)
    while not engine.step():
        pass
    for name in ("push", "finish"):
        monkeypatch.setattr(f"medha.engine.request.Detokenizer.{name}", Mock(side_effect=ZeroDivisionError))
    with pytest.raises(EngineDeadError, match="ZeroDivisionError") as caught:
        engine.step()
    assert [o.request_id for o in caught.value.outputs] == ["a", "b"]
    assert all(o.outputs[0].token_ids[:1] == [ord(" ")] for o in caught.value.outputs)


def test_a_scheduler_that_runs_nothing_is_an_error_and_not_a_hang(bytes_model: Model) -> None:
    engine = bytes_model.engine()
    engine.add_request("one", PROMPTS[0], PARAMS)
    engine.scheduler.schedule = lambda now_s: Decision()
    with pytest.raises(EngineDeadError, match="the scheduler runs none of the unfinished requests:\n1 unfinished"):
        engine.step()


def test_an_id_and_what_was_prepared_are_queued_once(bytes_model: Model, expected: Tokens) -> None:
    engine = bytes_model.engine()
    engine.add_prepared(prepared := engine.prepare("one", PROMPTS[0], PARAMS), arrival_s=0.0)
    for again in (prepared, engine.prepare("one", PROMPTS[1], PARAMS)):
        with pytest.raises(ValidationError, match=r"^request_id='one' is in flight already") as caught:
            engine.add_prepared(again, arrival_s=0.0)
        assert caught.value.param == "request_id"
    assert engine.num_unfinished == 1
    assert finish(engine)["one"].outputs[0].token_ids == expected[0]
    with pytest.raises(ValidationError, match=r"^request_id='one' was queued; prepare it again"):
        engine.add_prepared(prepared, arrival_s=0.0)
    assert serve_one(engine, PROMPTS[2], PARAMS).outputs[0].token_ids == expected[2]


@pytest.mark.parametrize("end", ["length", "abort"])
def test_who_has_ended_is_freed_without_the_garbage_collector(bytes_model: Model, end: str) -> None:
    engine = bytes_model.engine(scheduler="medha", depth=2, prefix_caching=True)
    gc.collect(), gc.disable()
    for n in (1, 2):
        request = engine.prepare("one", PROMPTS[0], SamplingParams(n=n, max_tokens=NUM_TOKENS))
        engine.add_prepared(request, arrival_s=0.0)
        kept = weakref.ref(request)
        del request
        engine.step()
        if end == "abort":
            engine.abort("one")
        assert finish(engine)["one"].outputs[0].finish_reason == end
        assert kept() is None
    assert "BatchBuilder" not in {type(one).__name__ for one in gc.get_objects()}  # nor the rows of a batch


def resident_bytes() -> int:
    """Memory of this process."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_thousands_at_once_take_70_kb_each() -> None:
    """That nothing is kept of them is looked at in tests/serve/test_load.py."""
    engine, taken = make_engine(0.0), [resident_bytes()]
    engine.on_step = lambda *_: taken.append(resident_bytes())
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, output_kind="final_only")
    for i in range(2000):
        engine.add_request(str(i), [i % 256] * (5 + i % 50), params)
    assert [output.outputs[0].token_ids for output in drained(engine)] == [[7] * 4] * 2000
    assert max(taken) - taken[0] < 140 * 2**20
