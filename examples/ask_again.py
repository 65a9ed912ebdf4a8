"""Ask twice about one long document: the second question finds it read.

python -m examples.ask_again --num-tokens 32868
OMP_NUM_THREADS=1 torchrun --nproc-per-node 2 -m examples.ask_again --num-tokens 32868 --kvp 2

The needle model is written to the folder ``medha-needle`` in that of temporary files.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import suppress
from pathlib import Path

from medha import LLM, SamplingParams
from medha.models.needle import make_haystack, write_needle

QUESTION = 64  # bytes, which are the needle model's tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-tokens", type=int, default=4096)
    parser.add_argument("--kvp", type=int, default=1)
    parser.add_argument("--spp", type=int, default=1)
    given = parser.parse_args()
    folder = Path(tempfile.gettempdir()) / "medha-needle"
    if not folder.exists():
        with suppress(OSError):  # another rank was first
            write_needle(Path(tempfile.mkdtemp())).rename(folder)
    length = given.num_tokens + QUESTION
    with LLM(str(folder), max_model_len=2 * length, kvp=given.kvp, spp=given.spp) as llm:
        haystack = make_haystack(length, depth=0.5, seed=0)
        document, question = haystack.prompt[:-QUESTION], haystack.prompt[-QUESTION:]
        params = SamplingParams(temperature=0.0, max_tokens=16)
        for asked in (question[::-1], question):
            for output in llm.generate(document + asked, params, use_tqdm=False):
                ttft_s, text = output.metrics.ttft, output.outputs[0].text
                print(f"{output.num_cached_tokens} tokens cached, TTFT {ttft_s:.3f} s, answer {text!r}")


if __name__ == "__main__":
    main()
