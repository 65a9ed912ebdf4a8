"""What a step of decodes costs beside the model: thread CPU time of scheduling, preparing, sampling and handing out.

python -m tools.step_cost                                  # PYTHONPATH says whose medha is measured

One engine in one process on one thread. The model is the needle model with its tokenizer; embedding, rotation, layers
and head are put in place of by tensors that are there, so what is left is the host's work. Requests of 40 tokens are
read first; then steps are counted in which all of them decode. A cell is the median step of a round, and of the rounds
the median, least and most: microseconds of the thread that steps. Two trees are compared by runs in turn.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any, get_args
from unittest import mock

import numpy as np
import torch

from medha import LLM, SamplingParams
from medha.engine.engine import Engine
from medha.errors import ConfigError
from medha.models.decoder import Decoder
from medha.models.needle import HIDDEN_SIZE, VOCAB_SIZE, write_needle
from medha.params import OutputKind
from medha.worker import runner
from tools.command import chosen, main, numbers, print_head, print_row

KINDS: tuple[OutputKind, ...] = get_args(OutputKind)
PROMPT, FILL = 40, 40  # tokens of a prompt; steps until all decode


def round_us(engine: Engine, rows: int, kind: OutputKind, steps: int, number: int) -> float:
    """Microseconds of the median step in which so many requests decode."""
    params = SamplingParams(temperature=0.0, max_tokens=steps + 2 * FILL, ignore_eos=True, output_kind=kind)
    for index in range(rows):
        ids = np.random.default_rng([number, index]).integers(97, 123, PROMPT).tolist()
        engine.add_request(f"{number}-{index}", {"prompt_token_ids": ids}, params)
    for _ in range(FILL):
        engine.step()
    assert not engine.scheduler.num_waiting and not engine.prefills(), "every request decodes"
    took_ns = []
    for _ in range(steps):
        begin_ns = time.thread_time_ns()
        engine.step()
        took_ns.append(time.thread_time_ns() - begin_ns)
    engine.abort_all()
    while engine.has_unfinished:
        engine.step()
    return statistics.median(took_ns) / 1e3


def step_cost(rows: str = "1,64,256", kinds: str = "final_only,delta", steps: int = 200, rounds: int = 7) -> None:
    """Print the host's microseconds a step, by decodes in it and by how outputs are streamed."""
    sizes = [int(one) for one in numbers("rows", rows)]
    wanted = [kind for kind in KINDS if kind in chosen("kinds", kinds, KINDS)]
    if min(*sizes, steps, rounds) < 1:
        raise ConfigError(f"rows={rows!r}, steps={steps}, rounds={rounds}; accepted: 1 at least")
    most = max(sizes)
    hidden, logits = torch.zeros(4096, HIDDEN_SIZE), torch.zeros(most, VOCAB_SIZE)
    logits[torch.arange(most), 97 + torch.arange(most) % 26] = 1.0  # a letter, another one in each row
    fakes: dict[str, Any] = {
        "embed": lambda self, ids: hidden[: len(ids)],
        "forward": lambda self, x, *rest: x,
        "logits": lambda self, x, head=None: logits[: len(x)],
    }
    blocks = -(-(PROMPT + steps + 2 * FILL) // 64)
    options: dict[str, Any] = {
        "num_threads": 1,
        "max_num_seqs": most,
        "num_kv_blocks": most * blocks,
        "prefix_caching": False,
    }
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(Decoder, **fakes),
        mock.patch.object(runner, "cos_sin", return_value=(hidden, hidden)),
    ):
        write_needle(Path(folder))
        with LLM(folder, block_size=64, max_batch_tokens=4096, max_model_len=4096, **options) as llm:
            cells = [(size, kind) for size in sizes for kind in wanted]
            found: dict[tuple[int, OutputKind], list[float]] = {cell: [] for cell in cells}
            for number in range(rounds + 1):
                for at, cell in enumerate(cells):
                    found[cell].append(round_us(llm.engine, *cell, steps, number * len(cells) + at))
    print_head("decodes", "output_kind", "us a step", "least", "most", "us a decode")
    for (size, kind), all_us in found.items():
        took_us = all_us[1:]  # the first round warms up
        middle = statistics.median(took_us)
        ends = f"{min(took_us):.0f}", f"{max(took_us):.0f}"
        print_row(size, kind, f"{middle:.0f}", *ends, f"{middle / size:.1f}")


if __name__ == "__main__":
    main(step_cost)
