"""``medha bench micro attention``, ``sampling`` and ``scheduler`` at a toy size, and what the machine's rates are."""

from itertools import pairwise, product

import pytest
import torch

from medha.bench.micro import WAYS, Queue, SchedulerOptions
from medha.bench.timing import in_turn, matrix_product
from tests.bench.conftest import Bench

SMALL = ["--num-iters", "2", "--num-iters-warmup", "1"]


@pytest.mark.usefixtures("_small_rates")
def test_attention(bench: Bench) -> None:
    given = ["--chunk-size", "32,1,8", "--kv-lens", "300,16", "--dtype", "bfloat16"]
    report, done = bench("micro", "attention", *SMALL, *given)
    assert report["model"]["num_kv_heads"] == 1 and report["backend"] in ("cpu", "torch")
    cells = report["results"]
    expected = [(16, 1), (16, 8), (300, 1), (300, 8), (300, 32)]  # chunks longer than the cache are left out
    assert [(c["kv_len"], c["chunk"]) for c in cells] == expected
    for cell in cells:
        assert cell["timing"]["runs"] == 2
        kv_len, model = cell["kv_len"], report["model"]
        scores = sum(query + 1 for query in range(kv_len - cell["chunk"], kv_len))  # under the mask
        assert cell["flops"] == 4 * model["num_heads"] * model["head_dim"] * scores
        assert cell["flops_per_s"] == pytest.approx(cell["flops"] / cell["timing"]["median_s"])
        assert cell["share"] == pytest.approx(cell["flops_per_s"] / report["matrix_product"]["flops_per_s"])
        assert cell["share"] > 0 and cell["overhead"] > -1
    product = report["matrix_product"]
    assert product["flops_per_s"] == pytest.approx(2 * 192**3 / product["timing"]["median_s"])
    assert product["timing"]["min_s"] <= product["timing"]["median_s"] <= product["timing"]["max_s"]
    assert [c["overhead"] for c in cells if (c["kv_len"], c["chunk"]) in ((16, 8), (300, 32))] == [0.0] * 2
    assert "bfloat16" in done.out and "overhead" in done.out


def test_sampling(bench: Bench) -> None:
    results = bench("micro", "sampling", *SMALL, "--batch-size", "1,3")[0]["results"]
    assert [(one["batch_size"], one["way"]) for one in results] == [*product((1, 3), WAYS)]
    assert all(one["timing"]["median_s"] > 0 for one in results)


def test_scheduler(bench: Bench) -> None:
    options = ["--num-waiting", "20,40", "--policy", "lars", "--policy", "priority", "--num-running", "8"]
    options += ["--num-prefills", "4", "--num-iters", "10", "--num-iters-warmup", "2"]
    report, done = bench("micro", "scheduler", *options, of=[])
    assert {"date", "cpu", "python", "packages"} <= report["environment"].keys()
    assert [(r["policy"], r["waiting"]) for r in report["results"]] == [*product(("lars", "priority"), (20, 40))]
    for result in report["results"]:
        for call in ("schedule", "complete", "both"):
            figures = [result[call][name] for name in ("median_ms", "p99_ms", "max_ms")]
            assert figures[0] > 0 and figures == sorted(figures)
    assert "schedule" in done.out and "complete" in done.out


@pytest.mark.parametrize(("policy", "prefix_len"), [("lars", 0), ("fcfs", 256), ("priority:edf", 0)])
def test_the_queue_stays_as_long_as_it_was(policy: str, prefix_len: int) -> None:
    """So many decode in every batch, so many wait after it, and prefills are under way: at most every other batch
    leaves them out."""
    queue = Queue(policy, 60, SchedulerOptions(num_decoding=12, num_prefilling=4, prefix_len=prefix_len))
    steps = [queue.step() for _ in range(45)][5:]
    assert queue.scheduler.num_waiting >= 60 and 12 <= queue.scheduler.num_running <= 16
    assert all(abs(decodes - 12) <= 2 for *_, decodes, _ in steps)
    assert all(chunks + later > 0 for (*_, chunks), (*_, later) in pairwise(steps))
    assert policy.startswith("priority") or all(chunks > 0 for *_, chunks in steps)


def test_a_full_pool_lets_nobody_start() -> None:
    """One decode holds it to the last step, whatever classes wait."""
    queue = Queue("priority", 200, SchedulerOptions(is_full=True, warmup=5, runs=30))
    for _ in range(35):
        *_, decodes, chunks = queue.step()
        assert (decodes, chunks) == (1, 0)
    assert queue.scheduler.num_waiting == 200 and queue.scheduler.num_running == 1
    assert queue.scheduler.memory.num_used == queue.scheduler.memory.num_blocks


@pytest.mark.usefixtures("_small_rates")
@pytest.mark.parametrize(("has_it", "computed"), [(True, torch.float16), (False, torch.float32)])
def test_16_bits_without_a_kernel_for_them_are_measured_in_32(
    has_it: bool, computed: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = set[torch.dtype]()
    monkeypatch.setattr("medha.bench.timing.onednn_has", lambda dtype: has_it)
    monkeypatch.setattr(torch, "mm", lambda left, right, out: seen.update((left.dtype, right.dtype, out.dtype)))
    matrix_product(torch.float16, torch.device("cpu")).seconds()
    assert seen == {computed}


def test_contestants_take_turns_and_the_warm_up_does_not_count() -> None:
    calls: list[str] = []

    def contestant(name: str, start_s: float) -> float:
        calls.append(name)
        return start_s + len(calls)

    contestants = {"a": lambda: contestant("a", 10.0), "b": lambda: contestant("b", 20.0)}
    seconds = in_turn(contestants, warmup=1, runs=2)
    assert "".join(calls) == "ababab"
    assert seconds == {"a": [13.0, 15.0], "b": [24.0, 26.0]}
