"""Whether the packer deals a chunk where that is faster: its choices against what a ring and a gather take here.

torchrun --nproc-per-node 2 -m medha profile medha/bench/random_llama --kvp 2 --num-threads 1 --quick --output p.json
python -m tools.ring_choice --profile p.json     # 20 pairs of chunk and history; without a profile, by the CPU's spec

Two groups of one rank, one thread each. Every pair is a step of one request over random keys and values (as of ``medha
bench scaling --mode chunk``); ring and gather take turns, and the least of their steps counts, as others' work on the
machine only adds. A choice is wrong where the other way was more than a tenth faster.
"""

from __future__ import annotations

from functools import partial
from itertools import product
from pathlib import Path

from medha.bench.scaling import GATHER, RING, ScalingOptions, start_job
from medha.bench.timing import in_turn
from medha.cli.options import parse_lengths
from medha.config import ParallelConfig
from medha.cost.coefficients import Coefficients
from medha.cost.hardware import load_spec
from medha.cost.predictor import Predictor, ring_or_gather_s
from medha.cost.roofline import stage_coefficients
from tools.command import main
from tools.live import random_llama

WRONG = 1.1
_LAYOUT = ParallelConfig(kvp=2)


def ring_choice(
    profile: Path | None = None,
    chunks: str = "32,128,512,1024",
    histories: str = "1K,4K,8K,16K,32K",
    hf_overrides: str = "{}",
    runs: int = 4,
) -> None:
    """Measure each pair in both ways, --runs steps of each behind one that does not count; print a line a pair."""
    pairs = list(product(parse_lengths("chunks", chunks), parse_lengths("histories", histories)))
    subject, largest = random_llama(hf_overrides), max(q_len for q_len, _ in pairs)
    longest, num_right = largest + max(history for _, history in pairs), 0
    if profile is None:
        model = subject.model_config(longest=longest)
        coefficients = stage_coefficients(load_spec("cpu"), model, _LAYOUT, 0, dtype_bytes=4)
    else:
        coefficients = Coefficients.load(profile)
    predictor = Predictor(coefficients)
    print("  chunk  history | ring, gather measured | predicted, ms | packer  slower than the other")
    with start_job(ScalingOptions(subject=subject, mode="chunk", chunk_size=largest), _LAYOUT, longest) as job:
        for q_len, history in pairs:
            ask = partial(job.ask, q_len=q_len, context=history, is_decode=False, steps=1)
            found = in_turn({way: partial(ask, attention=way) for way in (RING, GATHER)}, warmup=1, runs=runs)
            taken_s = {way: min(second for one in ran for second in one["seconds"]) for way, ran in found.items()}
            tick = predictor.tick()
            said_s = dict(zip((RING, GATHER), ring_or_gather_s([tick, tick], history, q_len), strict=True))
            choice = RING if said_s[RING] < said_s[GATHER] else GATHER
            slower = taken_s[choice] / min(taken_s[way] for way in taken_s if way != choice)
            num_right += (is_right := slower <= WRONG)
            print(
                f"{q_len:7d} {history:8d} | {1e3 * taken_s[RING]:9.1f} {1e3 * taken_s[GATHER]:11.1f} | "
                f"{1e3 * said_s[RING]:6.1f} {1e3 * said_s[GATHER]:6.1f} | {choice:6s} {100 * (slower - 1):+6.1f} %"
                f"{'' if is_right else '  wrong'}",
                flush=True,
            )
    print(f"{num_right} of {len(pairs)} choices at most {100 * (WRONG - 1):.0f} % slower")


if __name__ == "__main__":
    main(ring_choice)
