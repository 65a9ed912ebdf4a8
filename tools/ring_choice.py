"""Whether the packer deals a chunk where that is faster: its choices against what a ring and a gather take here.

torchrun --nproc-per-node 2 -m medha profile medha/bench/random_llama --kvp 2 --num-threads 1 --quick --output p.json
python -m tools.ring_choice --profile p.json     # 20 pairs of chunk and history; without a profile, by the CPU's spec

Two groups of one rank, one thread each. Every pair is a step of one request over random keys and values (as of ``medha
bench scaling --mode chunk``); ring and gather take turns, and the least of their steps counts, as others' work on the
machine only adds. A choice is wrong where the other way was more than a tenth faster.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path

from medha.bench.harness import Subject
from medha.bench.scaling import GATHER, RING, ScalingOptions, start_job
from medha.cli.options import parse_lengths
from medha.config import ParallelConfig
from medha.cost.coefficients import Coefficients
from medha.cost.hardware import load_spec
from medha.cost.predictor import Predictor, ring_or_gather_s
from medha.cost.roofline import stage_coefficients

CHUNKS, HISTORIES = "32,128,512,1024", "1K,4K,8K,16K,32K"
WRONG = 1.1
_LAYOUT = ParallelConfig(kvp=2)


def main() -> None:
    """Measure, and print a line a pair."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path, help="of this machine, model and kvp 2")
    parser.add_argument("--chunks", default=CHUNKS)
    parser.add_argument("--histories", default=HISTORIES)
    parser.add_argument("--hf-overrides", type=json.loads, default=None)
    parser.add_argument(
        "--runs", type=int, default=4, help="steps of each way and pair, behind one that does not count"
    )
    args = parser.parse_args()
    chunks, histories = parse_lengths("chunks", args.chunks), parse_lengths("histories", args.histories)
    subject = Subject(hf_overrides=args.hf_overrides)
    longest = max(chunks) + max(histories)
    if args.profile is None:
        model = subject.model_config(longest=longest)
        coefficients = stage_coefficients(load_spec("cpu"), model, _LAYOUT, 0, dtype_bytes=4)
    else:
        coefficients = Coefficients.load(args.profile)
    predictor = Predictor(coefficients)
    options = ScalingOptions(subject=subject, mode="chunk", chunk_size=max(chunks))
    num_right = 0
    print("  chunk  history | ring, gather measured | predicted, ms | packer  slower than the other")
    with start_job(options, _LAYOUT, longest) as job:
        for q_len, history in product(chunks, histories):
            work = {"q_len": q_len, "context": history, "is_decode": False, "steps": 1}
            found: dict[str, list[float]] = {RING: [], GATHER: []}
            for _ in range(1 + args.runs):
                for attention, seconds in found.items():
                    seconds += job.ask(**work, attention=attention)["seconds"]
            ring_s, gather_s = (min(seconds[1:]) for seconds in found.values())
            tick = predictor.tick()
            said = ring_or_gather_s([tick, tick], history, q_len)
            chosen, other = (ring_s, gather_s) if said[0] < said[1] else (gather_s, ring_s)
            num_right += (is_right := chosen <= WRONG * other)
            said_ms, choice = [1e3 * seconds for seconds in said], RING if said[0] < said[1] else GATHER
            print(
                f"{q_len:7d} {history:8d} | {1e3 * ring_s:9.1f} {1e3 * gather_s:11.1f} | {said_ms[0]:6.1f} "
                f"{said_ms[1]:6.1f} | {choice:6s} {100 * (chosen / other - 1):+6.1f} %{'' if is_right else '  wrong'}",
                flush=True,
            )
    print(f"{num_right} of {len(chunks) * len(histories)} choices at most {100 * (WRONG - 1):.0f} % slower")


if __name__ == "__main__":
    main()
