"""``medha verify`` in one process, its dense attention against another, how rows are judged and put together; and the
demo, on a short document."""

import io
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from rich.console import Console

import medha.verify.kernels as kernels
from medha.attention.interface import LayerShape
from medha.attention.torch_backend import TorchBackend
from medha.config import ParallelConfig
from medha.models.needle import write_needle
from medha.models.reference import next_token_logprobs, random_weights
from medha.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from medha.verify import demo
from medha.verify.__main__ import chosen_layout, layout_of
from medha.verify.kernels import dense_attention, largest_error, lse_limit, out_limit
from medha.verify.rows import FAIL, NOT_RUN, PASS, Row, Setting, attempted, exact, held, not_run, worst_of
from medha.verify.serving import compared, find_needle, memory_row, random_llama
from medha.worker.runner import Runner
from medha.worker.shard import choose_backend
from tests.attention.reference import masked_attention
from tests.commands import Command, Done

QUICK = ["--device", "cpu", "--needle-tokens", "256"]


def verify(command: Command, report: Path) -> tuple[Done, set[tuple[str, str]]]:
    """Runs the command; how it ended, and the checks of its report with each verdict that they have."""
    done = command("verify", *QUICK, "--output-json", report)
    return done, {(row["check"], row["verdict"]) for row in json.loads(report.read_text())["checks"]}


def test_all_is_well_in_one_process(command: Command, tmp_path: Path) -> None:
    done, verdicts = verify(command, tmp_path / "report.json")
    assert (done.code, done.err) == (0, "")
    assert "medha verify: kvp=1 x spp=1 x tp=1, 1 rank, float32" in done.out
    assert "11 passed, 0 failed, 0 not run" in done.out
    assert verdicts == {(check, PASS) for check in ("attention", "merge", "parity", "needle", "KV bytes")}


BACKEND = type(choose_backend("auto", LayerShape(8, 2, 64, torch.float32), torch.device("cpu"))[0])


@pytest.mark.parametrize(
    ("owner", "name", "failing"),
    [(kernels, "merge_partials", {"merge"}), (BACKEND, "run", {"attention", "merge", "parity"})],
    ids=["merge", "backend"],
)
def test_a_part_in_a_thousand_is_found(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, failing: set[str]
) -> None:
    """Which leaves the needle as it is."""
    right = getattr(owner, name)

    def off(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = right(*args)
        return out * 1.001, lse

    monkeypatch.setattr(owner, name, off)
    done, verdicts = verify(command, tmp_path / "report.json")
    assert done.code == 3 and "FAIL" in done.out
    assert {check for check, verdict in verdicts if verdict == FAIL} == failing


RAISING = Mock(side_effect=RuntimeError("no such kernel"))


def test_a_backend_that_raises_has_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TorchBackend, "run", RAISING)
    rows = attempted("attention", kernels.attention_rows(TorchBackend(), torch.device("cpu"), torch.float32))
    assert [(row.verdict, row.figure) for row in rows] == [(FAIL, "RuntimeError: no such kernel")]


def test_an_engine_that_fails_leaves_the_table_so_far(monkeypatch: pytest.MonkeyPatch, command: Command) -> None:
    monkeypatch.setattr(Runner, "run", RAISING)
    done = command("verify", *QUICK)
    assert done.code == 4 and "no such kernel" in done.err
    assert "after merge" in done.out and "7 passed, 1 failed, 0 not run" in done.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--needle-tokens", "10"], "needle_tokens=10; accepted: 256 or more"),
        (["--dtype", "float16"], "dtype='float16'; accepted: auto, float32, bfloat16"),
        (["--attention-backend", "x"], "attention_backend='x'; accepted: auto, flashinfer, cpu, torch"),
        (["--device", "tpu"], "device='tpu'; accepted: auto, cpu, cuda, cuda:N"),
        (["--kvp", "2"], "kvp=2 is 2 ranks, and 1 were started"),
        (["--output-json", "no/such/folder"], "report file no/such/folder cannot be written"),
    ],
)
def test_bad_options(arguments: list[str], message: str, command: Command) -> None:
    done = command("verify", *arguments)
    assert (done.code, done.out, message in done.err) == (2, "", True)


@pytest.mark.parametrize(
    ("world_size", "kvp", "spp", "tp"),
    [(1, 1, 1, 1), (2, 2, 1, 1), (3, 3, 1, 1), (4, 2, 2, 1), (6, 3, 2, 1), (8, 2, 2, 2), (12, 6, 2, 1), (64, 4, 2, 8)],
)
def test_the_chosen_layout_has_every_axis_it_can(world_size: int, kvp: int, spp: int, tp: int) -> None:
    assert chosen_layout(world_size) == ParallelConfig(tp=tp, spp=spp, kvp=kvp)


def test_of_a_layout_that_is_asked_for_the_other_axes_are_one() -> None:
    assert layout_of(None, 2, 2, world_size=4) == ParallelConfig(spp=2, kvp=2)


def test_the_worst_rank_is_shown() -> None:
    good, bad = held("attention", "output", 0.1, 1.0), held("attention", "output", 2.0, 1.0)
    absent = not_run("tp", "all-reduce", "tp=1")
    assert worst_of([[good, absent], [replace(good, strain=0.9, figure="0.9"), absent]]) == [
        replace(good, strain=0.9, figure="0.9"),
        absent,
    ]
    assert worst_of([[good], [bad], [good], [bad]]) == [replace(bad, what="output (rank 1, 3)")]
    assert worst_of([[exact("a", "b", 0)]]) == [exact("a", "b", 0)]


def test_parity_counts_wrong_tokens_and_log_probabilities() -> None:
    shape = random_llama(ParallelConfig(), "float32")
    weights = random_weights(shape, seed=0)
    prompt, tokens = [5, 7, 11], []
    for _ in range(24):
        tokens.append(int(next_token_logprobs(shape, weights, [*prompt, *tokens])[-1].argmax()))
    rows_TV = next_token_logprobs(shape, weights, [*prompt, *tokens[:-1]])

    def judged(rows_TV: torch.Tensor, tokens: list[int]) -> list[str]:
        """The verdicts on an output with these log-probabilities."""
        rows = rows_TV[len(prompt) - 1 :]
        entries = [{i: Logprob(float(row[i]), rank=1) for i in row.topk(20).indices.tolist()} for row in rows]
        completion = CompletionOutput(index=0, text=None, token_ids=tokens, logprobs=entries, finish_reason="length")
        output = RequestOutput("0", None, prompt, [completion], True, RequestMetrics(arrival=0.0))
        return [row.verdict for row in compared([output], shape, weights, what="x", limit=1e-4)]

    assert judged(rows_TV, tokens) == [PASS, PASS]
    assert judged(rows_TV + 1e-3, tokens) == [PASS, FAIL]
    assert judged(rows_TV, [*tokens[:-1], (tokens[-1] + 1) % 512]) == [FAIL, PASS]
    assert judged(rows_TV * float("nan"), tokens)[1] == FAIL
    assert judged(rows_TV[:-1], tokens[:-1])[0] == FAIL


def test_a_layout_that_the_needle_does_not_fit_is_not_run(tmp_path: Path) -> None:
    setting = Setting(ParallelConfig(spp=3))
    row, kv_bytes = find_needle(setting, write_needle(tmp_path), 512, 0.1, lambda text: None)
    assert (row.verdict, row.figure) == (NOT_RUN, "spp=3 stages for 2 layers; accepted: 1 to 2")
    assert memory_row(setting.parallel, 512, [kv_bytes] * 3).verdict == NOT_RUN


def test_bfloat16_has_rows_of_its_own_and_each_needle_has(tmp_path: Path, command: Command) -> None:
    report = tmp_path / "report.json"
    needles = ["--needle-tokens", "256,512", "--needle-depth", "0", "--needle-depth", "0.9"]
    done = command("verify", "--device", "cpu", "--dtype", "bfloat16", *needles, "--output-json", report)
    assert done.code == 0 and "fact at 90% of 512 tokens" in done.out
    assert "output, float32, 18 shapes" in done.out and "output, bfloat16, 18 shapes" in done.out
    found = json.loads(report.read_text())["needles"]
    assert [(one["num_tokens"], one["depth"]) for one in found] == [(256, 0), (256, 0.9), (512, 0), (512, 0.9)]
    assert all(one["found"] and one["ttft_s"] > 0 and one["peak_memory_bytes"] > 1 << 20 for one in found)


def test_a_rank_that_holds_more_than_its_share_fails() -> None:
    parallel = ParallelConfig(kvp=2, spp=2)
    whole = 8192 * 4096
    row: Row = memory_row(parallel, 8192, [whole // 4] * 4)
    assert row.verdict == PASS
    assert memory_row(parallel, 8192, [whole // 4] * 3 + [whole // 3]).verdict == FAIL
    assert memory_row(parallel, 8192, [0] * 4).verdict == FAIL  # nothing was held, so nothing was measured
    assert (row.figure, row.limit) == ("25.0%", "29.1%")


@pytest.mark.parametrize(("L", "S"), [(1, 1), (1, 300), (7, 300), (40, 40), (3, 0)])
def test_dense_attention_is_that_of_the_tests(L: int, S: int) -> None:
    generator = torch.Generator().manual_seed(L * 1000 + S)
    qkv = [torch.randn(T, heads, 64, generator=generator) for T, heads in ((L, 8), (S, 2), (S, 2))]
    every = torch.ones(L, S, dtype=torch.bool)
    for causal, mask in ((True, every.tril(S - L)), (False, every)):
        want = masked_attention(*qkv, mask)
        torch.testing.assert_close(dense_attention(*qkv, causal=causal), want, rtol=0, atol=1e-12)


def test_largest_error() -> None:
    zeros = torch.zeros(3)
    assert largest_error(zeros, zeros) == 0.0
    assert largest_error(zeros.fill_(-torch.inf), zeros) == 0.0
    for bad in (torch.nan, torch.inf, -torch.inf):
        assert largest_error(torch.tensor([bad, 0.0]), torch.zeros(2)) == float("inf")


def test_limits_grow_with_what_is_compared() -> None:
    assert out_limit(torch.tensor([0.1]), torch.float32) == 2e-5
    assert out_limit(torch.tensor([-2.0]), torch.bfloat16) == 4 * 2**-7 * 2.0
    assert lse_limit(torch.tensor([10.0]), torch.float32, "torch") == pytest.approx(2e-5)
    assert lse_limit(torch.tensor([0.0]), torch.bfloat16, "torch") == pytest.approx(2e-4)
    assert lse_limit(torch.tensor([0.0]), torch.bfloat16, "flashinfer") == 2.0**-8


def test_every_answer_is_right_and_questions_do_not_wait_for_the_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results, comparison = Mock(wraps=demo.results), Mock(wraps=demo.comparison)
    monkeypatch.setattr(demo, "results", results)
    monkeypatch.setattr(demo, "comparison", comparison)
    out = io.StringIO()
    assert demo.run_demo(long_prompt_tokens=2048, console=Console(file=out, width=80), live=False) == 0

    text = out.getvalue()
    lines = text.splitlines()
    traces = [Path(line) for line in lines if line.endswith(".json")]
    assert all(len(line) <= 80 for line in lines if Path(line) not in traces)
    assert text.startswith("One document of 2,048 tokens with a fact hidden in it is read,")
    assert text.endswith("6 of 6 answers right.\n")

    names = ["document", "chat-1", "chat-2", "chat-3", "chat-4", "chat-5"]
    finished, _ = results.call_args.args
    again, *others = comparison.call_args.args
    rows = comparison(again, *others)
    assert [row["request"] for row in rows] == names and {row["answers"] for row in rows} == {"right"}
    answers = [output.outputs[0].text.strip() for output in finished]
    assert answers == ["7429-amber.", "31-plum.", "58-fern.", "07-jade.", "92-rust.", "64-opal."]

    document, *shorts = [output.metrics for output in finished]
    assert all(0 < short.arrival < document.first_token for short in shorts)
    # most are answered before the document is read; how much sooner is for the clock to say, not for a test
    assert median(short.first_token for short in shorts) < document.first_token

    assert [output.request_id for output in again] == names
    for output, metrics in zip(again, (document, *shorts), strict=True):
        start = again[0].metrics.arrival
        assert output.metrics.arrival - start == pytest.approx(metrics.arrival - document.arrival)
    assert again[0].metrics.num_chunks == 1  # whole
    for trace in traces:
        events = json.loads(trace.read_text())["traceEvents"]
        assert set(names) <= {event["args"].get("name") for event in events if event["ph"] == "M"}
    assert [trace.name for trace in traces] == ["fcfs.json", "lars.json"]


def test_a_wrong_answer_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.StringIO()
    right = demo.questions(1024)
    monkeypatch.setattr(demo, "questions", lambda _: [right[0]._replace(answer=" 1234-amber."), *right[1:]])
    assert demo.run_demo(long_prompt_tokens=1024, console=Console(file=out), live=False) == 3
    assert "wrong" in out.getvalue()
    assert out.getvalue().endswith("5 of 6 answers right.\n")
