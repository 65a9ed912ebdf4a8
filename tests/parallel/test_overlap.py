"""Two stages work at once: chunk i + 1 is in stage 0 while chunk i is in stage 1; no stage waits to be told what to do.

Judged from what each rank recorded. No threshold in seconds: the machine may be busy with other things.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from medha.timeline import RankRecords, Timeline
from tests.parallel.workers import WorkerPool

NUM_CHUNKS = 20
CHUNK_SIZE = 128
SHAPE = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "eos_token_id": 2,
}


def read_prompts(folder: str, trace: str, layout: dict[str, int]) -> list[list[RankRecords]]:
    """On each rank: prefill two prompts one by one; rank 0 returns the records of each, and writes the trace."""
    from medha.config import EngineConfig
    from medha.engine.build import build_role
    from medha.params import SamplingParams

    prompt = [i % 256 for i in range(NUM_CHUNKS * CHUNK_SIZE)]
    options: dict[str, Any] = {"scheduler": "sarathi", "chunk_size": CHUNK_SIZE, "max_batch_tokens": CHUNK_SIZE}
    options |= {"num_kv_blocks": 24, "prefix_caching": False}  # the same prompt comes twice
    timeline = Timeline()
    config = EngineConfig.from_flat(folder, load_format="dummy", dtype="float32", **options, **layout)
    role = build_role(config, timeline=timeline)
    taken: list[list[RankRecords]] = []
    if role.engine is not None:
        for name in ("first", "second"):
            role.engine.add_request(name, prompt, SamplingParams(max_tokens=2, ignore_eos=True))
            while role.engine.has_unfinished:
                role.engine.step()
            timeline.collect()
            known = sum(len(stages[0].batches) for stages in taken)
            taken.append([one._replace(batches=one.batches[known:]) for _, one in sorted(timeline._ranks.items())])
        timeline.write(Path(trace))
    role.close()
    return taken


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose chunks take some milliseconds in each stage."""
    folder = tmp_path_factory.mktemp("overlap")
    (folder / "config.json").write_text(json.dumps(SHAPE))
    return folder


@pytest.fixture(scope="module")
def taken(workers: WorkerPool, folder: Path) -> list[list[RankRecords]]:
    """The records of each prompt on each of two stages; the trace is in the folder."""
    records: list[list[RankRecords]] = workers.run(
        read_prompts, 2, str(folder), str(folder / "trace.json"), {"spp": 2}
    )[0]
    return records


def overlaps(stages: list[RankRecords]) -> list[bool]:
    """Of each chunk but the last: whether the next one was in stage 0 while it was in stage 1."""
    first, second = (stage.batches[:NUM_CHUNKS] for stage in stages)
    pairs = zip(first[1:], second[:-1], strict=True)
    return [later.start_s < earlier.end_s and earlier.start_s < later.end_s for later, earlier in pairs]


def test_both_stages_run_every_batch_one_after_the_other(taken: list[list[RankRecords]]) -> None:
    """The next chunk is in stage 0 while this one is in stage 1; how many overlap is the machine's affair. The message
    of a chunk is there when it is asked for, as it leaves rank 0 a stage's time before the hidden states; rank 0 has
    the next one ready whenever it computes."""
    for stages in taken:
        assert [(stage.rank, stage.stage) for stage in stages] == [(0, 0), (1, 1)]
        ids = [[record.batch_id for record in stage.batches] for stage in stages]
        assert ids[0] == ids[1] == list(range(ids[0][0], ids[0][0] + NUM_CHUNKS + 1))  # and one decode
        for before, after in zip(*(stage.batches for stage in stages), strict=True):
            assert before.start_s < before.end_s <= after.start_s < after.end_s
        assert any(overlaps(stages))
        filled = stages[1].batches[2:NUM_CHUNKS]
        assert sum(not record.control_ready for record in filled) <= 2  # a busy machine may stop rank 0 for a while
        assert all(record.control_ready for record in stages[0].batches[2 : NUM_CHUNKS - 1])
        # batch k enters stage 0 after batch k - 3, the depth, has left stage 1, although most batches sample nothing
        first, second = (stage.batches for stage in stages)
        assert all(enters.start_s >= left.end_s for enters, left in zip(first[3:], second, strict=False))


def test_without_depth_nothing_overlaps(workers: WorkerPool, folder: Path) -> None:
    """The records can tell: one batch in flight is the schedule without a pipeline."""
    layout = {"spp": 2, "depth": 1}
    for stages in workers.run(read_prompts, 2, str(folder), str(folder / "serial.json"), layout)[0]:
        assert not any(overlaps(stages))
