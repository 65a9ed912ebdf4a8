"""What rank 0 keeps of a live run of several ranks: where each TTFT went, and a journal that replays."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from medha.engine.journal import replay
from medha.outputs import RequestOutput
from medha.params import SLO, SamplingParams
from tests.checkpoints import make_checkpoint, random_prompt
from tests.parallel.workers import WorkerPool

LENGTHS = (300, 20, 70, 1, 150, 40)
OPTIONS: dict[str, Any] = {
    "num_kv_blocks": 40,
    "block_size": 16,
    "max_batch_tokens": 64,
    "max_num_seqs": 4,
    "quantum_s": 0.02,
    "long_threshold": 200,
    "min_chunk": 16,
}


def serve(folder: str, journal: str, options: dict[str, Any], prompts: list[list[int]]) -> Any:
    """On each rank: requests that come as others run, one is cancelled. Rank 0 answers with the outputs."""
    from medha import LLM

    llm = LLM(folder, journal=journal, **options)
    if not llm.is_driver:
        llm.follow()
        return None
    finished = _drive(llm.engine, prompts)
    llm.close()
    return finished


def _drive(engine: Any, prompts: list[list[int]]) -> list[RequestOutput]:
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True, output_kind="final_only")
    finished: list[RequestOutput] = []
    for number, prompt in enumerate(prompts):
        slo = SLO(ttft_s=5.0, tpot_s=0.5) if number % 2 else None
        engine.add_request(str(number), prompt, params, slo=slo)
        finished += engine.step()
    engine.abort("4")
    while engine.has_unfinished:
        finished += engine.step()
    time.sleep(0.05)
    engine.add_request("late", prompts[2], params)
    while engine.has_unfinished:
        finished += engine.step()
    return finished


@pytest.mark.parametrize("layout", [{"spp": 2}, {"kvp": 2, "max_kv_per_group": 160}], ids=str)
def test_a_run_of_two_ranks_is_explained_and_replays(
    workers: WorkerPool, tmp_path: Path, layout: dict[str, int]
) -> None:
    make_checkpoint(tmp_path, "llama")
    journal = tmp_path / "run.journal"
    prompts = [random_prompt(length, seed=3) for length in LENGTHS]
    finished, _ = workers.run(serve, 2, str(tmp_path), str(journal), OPTIONS | layout, prompts)
    assert len(finished) == len(LENGTHS) + 1
    for output in finished:
        metrics, explained = output.metrics, output.metrics.explanation
        assert explained.request_id == output.request_id
        assert sum(explained.parts_s.values()) == pytest.approx(explained.total_s, abs=1e-6)
        if metrics.ttft is not None:
            assert explained.total_s == pytest.approx(metrics.ttft, abs=1e-6)
            assert explained.own_s > 0
    names = {output.request_id for output in finished}
    assert {name for output in finished for name, _ in output.metrics.explanation.others} < names
    recorded = replay(journal)
    assert (recorded.mismatch, recorded.num_batches > len(LENGTHS)) == (None, True)
    assert '"call":"cancel"' in journal.read_text()
