"""A 10M-token request is admitted while a short one decodes: nothing that is said or done in a step grows with it.

The figures are printed (``pytest -s``), not asserted: the machine may be busy with other things. What is asserted is
what bounds them: the size of each batch and message, and that the tokens are copied once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from math import prod
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from medha.engine.admission import prepare_request
from medha.engine.distributed import encode_sampling
from medha.engine.request import ModelLimits
from medha.params import SamplingParams
from medha.sched.memory import KVMemory
from tests.checkpoints import make_checkpoint
from tests.engines import load_decoder, make_engine
from tests.parallel.workers import WorkerPool

NUM_TOKENS = 10_000_000
SHORT = 10_000
CHUNK = 256
OPTIONS = {
    "scheduler": "sarathi",
    "chunk_size": CHUNK,
    "max_batch_tokens": CHUNK,
    "max_num_seqs": 4,
    "block_size": 256,
    "seed": 1,
}
NUM_STEPS = 12
ROW_INTS = 64  # a generous bound on the integers of a message beside token ids, for the two rows of these batches
OPEN_INTS = 256  # and of the sampling parameters of a new request


@dataclass(frozen=True)
class Figures:
    """Seconds, and the largest message, of one prompt's admission beside a decode."""

    decode_s: float  # median step before
    add_s: float
    largest_s: float  # of the steps with its first chunks; the first with the time to add it
    median_s: float
    return_s: float  # to abort it and return it; its tokens become a list
    message_ints: list[int]
    batch_ints: list[int]


def admit(folder: str, layout: dict[str, int], lengths: tuple[int, ...]) -> list[Figures] | None:
    """On each rank: add a prompt of each length while another request decodes, abort it after some chunks."""
    from medha import LLM

    options = OPTIONS | {"num_kv_blocks": max(lengths) // 256 + 8}
    llm = LLM(folder, **options, **layout)
    if not llm.is_driver:
        llm.follow()
        return None
    figures = [_admit_one(llm, length) for length in (lengths[0], *lengths)][1:]  # the first is a warm-up
    llm.close()
    return figures


def _admit_one(llm: Any, length: int) -> Figures:
    engine = llm.engine
    prompt = np.random.default_rng(0).integers(0, 256, length, dtype=np.int32)
    params = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True, output_kind="final_only")
    messages = _recorded_messages(engine.runner)
    batches: list[int] = []
    _record_batches(engine.scheduler, batches)
    engine.add_request("short", [1, 2, 3], params)
    before = [_timed(engine.step)[0] for _ in range(3 * NUM_STEPS)]
    messages.clear()
    batches.clear()
    add_s, _ = _timed(lambda: engine.add_request("long", prompt, params))
    steps = [_timed(engine.step)[0] for _ in range(NUM_STEPS)]
    assert engine.prefills()[0][1] >= (NUM_STEPS - 4) * (CHUNK - 1)
    abort_s, _ = _timed(lambda: engine.abort("long"))
    step_s, outputs = _timed(engine.step)
    assert [(o.request_id, o.outputs[0].finish_reason, len(o.prompt_token_ids)) for o in outputs] == [
        ("long", "abort", length)
    ]
    num_ints, batch_ints = list(messages), list(batches)
    engine.abort("short")
    while engine.has_unfinished:
        engine.step()
    assert engine.scheduler.memory.num_used == 0
    largest_s = max(add_s + steps[0], *steps[1:])
    return Figures(median(before), add_s, largest_s, median(steps), abort_s + step_s, num_ints, batch_ints)


def _recorded_messages(runner: Any) -> list[int]:
    """Integers of each message that rank 0 sends from now on; none on one rank."""
    from medha.parallel.control import encode

    sizes: list[int] = []
    sender = getattr(runner, "_sender", None)
    if sender is not None:
        send = type(sender).send

        def recording(message: Any, **kwargs: Any) -> None:
            sizes.append(len(encode(message)))
            send(sender, message, **kwargs)

        sender.send = recording
    return sizes


def _record_batches(scheduler: Any, sizes: list[int]) -> None:
    schedule = type(scheduler).schedule

    def recording(now_s: float) -> Any:
        batch = schedule(scheduler, now_s)
        if batch is not None:
            sizes.append(len(batch.to_ints()))
        return batch

    scheduler.schedule = recording


def _timed(function: Any) -> tuple[float, Any]:
    start = time.perf_counter()
    value = function()
    return time.perf_counter() - start, value


@pytest.mark.parametrize("layout", [{}, {"spp": 2}, {"kvp": 2}], ids=str)
def test_ten_million_tokens_beside_a_decode(workers: WorkerPool, tmp_path: Path, layout: dict[str, int]) -> None:
    make_ten_million_model(tmp_path)
    world_size = prod(layout.values())
    lengths = (SHORT, NUM_TOKENS)
    answers = (
        workers.run(admit, world_size, str(tmp_path), layout, lengths)
        if layout
        else [admit(str(tmp_path), layout, lengths)]
    )
    figures = answers[0]
    for length, one in zip(lengths, figures, strict=True):
        print(
            f"\n{layout or 'one rank'}, {length:,} tokens: decode step {1e3 * one.decode_s:.2f} ms (median); with "
            f"a chunk {1e3 * one.median_s:.2f} ms (median), largest {1e3 * one.largest_s:.2f} ms, of which add_request "
            f"{1e3 * one.add_s:.2f} ms; largest {one.largest_s / one.median_s:.1f} times the median; "
            f"returning it aborted {1e3 * one.return_s:.2f} ms; "
            f"largest batch {max(one.batch_ints)} integers, message {max(one.message_ints, default=0)}"
        )
    short, long = figures
    assert long.batch_ints[:NUM_STEPS] == short.batch_ints[:NUM_STEPS]
    assert max(long.batch_ints) <= ROW_INTS
    assert max(long.message_ints, default=0) <= CHUNK + ROW_INTS + OPEN_INTS
    assert max(long.message_ints[8:], default=0) <= CHUNK + ROW_INTS


def make_ten_million_model(folder: Path) -> None:
    """Two layers, as the needle model has, with so small keys that 10M tokens of them are 1.3 GB a layer (not used)."""
    make_checkpoint(
        folder,
        "llama",
        vocab_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=1 << 24,
    )


# -- where the tokens go ------------------------------------------------------------------------------------


def prepared(prompt: Any, **params: Any) -> Any:
    return prepare_request(
        "r",
        prompt,
        SamplingParams(max_tokens=1, **params),
        slo=None,
        limits=ModelLimits(256, 1 << 20),
        tokenizer=None,
        kv=KVMemory(num_blocks=1 << 12, block_size=256).limits,
    )


@pytest.mark.parametrize(
    "make",
    [list, tuple, np.array, torch.tensor, lambda ids: np.array(ids, np.uint8), lambda ids: torch.tensor(ids).int()],
)
def test_ids_become_an_array_of_our_own(make: Any) -> None:
    ids = [5, 0, 255, 5]
    given = make(ids)
    request = prepared(given)
    assert request.prompt_ids.dtype == np.int32
    assert request.prompt_token_ids == ids
    assert type(request.prompt_token_ids) is list and type(request.prompt_token_ids[0]) is int
    assert request.prompt_token_ids is request.prompt_token_ids
    if not isinstance(given, tuple):
        given[0] = 9
        assert (
            request.prompt_ids.tolist() == request.prompt_token_ids == ids
        )  # what runs does not change with what the caller keeps


@pytest.mark.parametrize(
    ("ids", "index", "shown"),
    [
        ([300, True], 0, "300"),
        ([1, True, 300], 1, "True"),
        ([1, 2**70], 1, str(2**70)),
        (np.array([1, 2, 256, -1]), 2, "256"),
        (np.array([1, 2**63], np.uint64), 1, str(2**63)),
        (torch.tensor([1, -7]), 1, "-7"),
        (torch.tensor([1.5], dtype=torch.bfloat16), 0, "1.5"),
    ],
)
def test_the_first_wrong_id_is_named(ids: Any, index: int, shown: str) -> None:
    with pytest.raises(ValueError, match=rf"^prompt_token_ids\[{index}\]={shown}; accepted: integers from 0 to 255$"):
        prepared({"prompt_token_ids": ids})


def test_the_runner_keeps_the_array_it_is_given(tmp_path: Path) -> None:
    """And a repetition penalty keeps, and sends to other ranks, only the prompt's distinct tokens."""
    make_checkpoint(tmp_path, "llama")
    engine = make_engine(load_decoder(tmp_path))
    runner: Any = engine.runner
    prompt = np.tile(np.array([7, 3, 200], np.int32), 1000)
    params = SamplingParams(max_tokens=1, repetition_penalty=1.3).resolve({})
    runner.open(0, prompt, params, seed=0, end_ids=())
    assert runner._prompts[0].data_ptr() == prompt.ctypes.data
    assert encode_sampling(0, runner.sampling(0))[1].tolist() == [3, 7, 200]
