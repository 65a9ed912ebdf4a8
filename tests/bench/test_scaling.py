"""``medha bench scaling`` at a toy size: its jobs run and end, and its figures are what the records say."""

from contextlib import AbstractContextManager, ExitStack, nullcontext

import pytest

from medha.bench.scaling import ONE_RANK, ScalingOptions, parse_layout, start_job, usage
from medha.bench.timing import Worker
from medha.config import ParallelConfig
from medha.errors import ConfigError
from medha.records import BatchRecord, RankRecords
from tests.bench.conftest import Bench
from tests.bench.shapes import ON_TINY


def test_table_and_report(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The jobs that are started for chunks do the work of the other modes too."""
    jobs: dict[ParallelConfig, Worker] = {}
    with ExitStack() as stack:

        def start_once(options: ScalingOptions, layout: ParallelConfig, longest: int) -> AbstractContextManager[Worker]:
            if layout not in jobs:
                jobs[layout] = stack.enter_context(start_job(options, layout, longest))
            return nullcontext(jobs[layout])

        monkeypatch.setattr("medha.bench.scaling.start_job", start_once)
        for mode, attention in (("chunk", "gather,ring"), ("prefill", "gather,ring"), ("decode", "gather")):
            check_mode(bench, mode, attention)
    assert list(jobs) == [ParallelConfig(), ParallelConfig(kvp=2)]


def check_mode(bench: Bench, mode: str, attention: str) -> None:
    options = ["--mode", mode, "--input-len", 600, "--chunk-size", 64, "--num-iters", 2, "--layouts", "kvp2"]
    report, done = bench("scaling", *options, "--attention", attention, of=ON_TINY[:2])
    lines = [(600, ONE_RANK, 1), (600, "kvp2", 2), (600, "kvp2 ring", 2)][: 2 + attention.count("ring")]
    assert [(r["length"], r["layout"], r["num_ranks"]) for r in report["results"]] == lines
    assert report["options"]["threads_a_rank"] == 1 and report["results"][0]["ratio"] == 1.0
    for result in report["results"]:
        assert len(result["seconds"]) == result["timing"]["runs"] == (2 if mode == "prefill" else 20)
        used = result["usage"]
        assert len(used["busy_s"]) == len(used["cpu_s"]) == result["num_ranks"]
        if mode != "prefill" or result["layout"] != "kvp2":  # whose prompt lies on the first group alone
            assert min(used["busy_s"]) > 0 and min(used["cpu_s"]) > 0
        assert 0 <= used["bubble"] < 1
    if mode == "chunk":
        one, two = report["results"][:2]
        assert one["usage"]["merge_wait_s"] == 0.0 < two["usage"]["merge_wait_s"]
    assert "kvp2" in done.out


def batch(batch_id: int, start_s: float, *, control_wait_s: float = 0.0, hidden_wait_s: float = 0.0) -> BatchRecord:
    return BatchRecord(batch_id, 8, start_s, start_s + 1.0, control_wait_s, hidden_wait_s, 0.0, 0.0)


def test_usage_counts_idle_time_and_leaves_out_the_filling_and_groups_without_work() -> None:
    first = RankRecords(0, 0, 0, tuple(batch(i, float(i)) for i in range(3)))
    filling = batch(0, 1.0, control_wait_s=0.25, hidden_wait_s=1.0)
    second = RankRecords(1, 1, 0, (filling, batch(1, 2.5, hidden_wait_s=0.5), batch(2, 3.5, control_wait_s=0.25)))
    found = usage([first, second])
    assert (found["busy_s"], found["bubble"]) == ([3.0, 3.0], pytest.approx(1 / 3))
    assert (found["transfer_wait_s"], found["control_wait_s"]) == (0.5, 0.25)
    found = usage([RankRecords(0, 0, 0, (batch(0, 0.0), batch(1, 1.0))), RankRecords(1, 0, 0, (), group=1)])
    assert (found["busy_s"], found["bubble"]) == ([2.0, 0.0], 0.5)


def test_layout_names() -> None:
    assert parse_layout("spp2") == ParallelConfig(spp=2)
    assert parse_layout("tp2spp4") == ParallelConfig(tp=2, spp=4)
    assert parse_layout("kvp2spp2") == ParallelConfig(kvp=2, spp=2)
    assert parse_layout("spp3tp2kvp4") == ParallelConfig(kvp=4, spp=3, tp=2)
    for wrong in ("", "2", "spp", "pp2", "spp2spp2", "kvp2x", "kvp2 tp2"):
        with pytest.raises(ConfigError, match=r"layout .*; accepted: for example spp2, tp2, kvp2 or kvp2spp2"):
            parse_layout(wrong)
