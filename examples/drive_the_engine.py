"""The engine's loop in your own hands: a long document and a short question at once, and a request that is aborted.

Nothing is downloaded. Each line that is printed is what one step added to a request.
"""

import tempfile
from pathlib import Path

from medha import LLM, SamplingParams
from medha.models.needle import make_haystack, write_needle  # a model of 6 MB that finds facts in its prompt

document = make_haystack(4096, depth=0.2)
answer = SamplingParams(temperature=0.0, max_tokens=32, output_kind="delta")
endless = SamplingParams(temperature=0.0, max_tokens=4000, ignore_eos=True, output_kind="delta")

with (
    tempfile.TemporaryDirectory() as folder,
    LLM(str(write_needle(Path(folder))), max_model_len=8192, max_num_seqs=8, chunk_size=256) as llm,
):
    engine = llm.engine
    engine.add_request("document", document.prompt, answer)
    engine.add_request("question", "The code of Ada is 31-plum.\nThe code of Ada is", answer)
    engine.add_request("endless", "la la la la ", endless)
    while engine.has_unfinished:
        for output in engine.step():
            piece = output.outputs[0]
            print(f"{output.request_id:>8}  {piece.text!r}")
            if output.finished:
                ttft = output.metrics.ttft or 0.0
                num_prompt, num_output = output.metrics.num_prompt_tokens, output.metrics.num_output_tokens
                print(
                    f"{output.request_id:>8}  {piece.finish_reason}: {num_prompt} + {num_output} tokens, {ttft=:.2f} s"
                )
                if output.request_id == "question":
                    engine.abort("endless")
