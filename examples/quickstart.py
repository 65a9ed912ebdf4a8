"""Ask a model about a text. It runs on a CPU and downloads nothing: the model is written to a temporary folder."""

import tempfile
from pathlib import Path

from medha import LLM, SamplingParams
from medha.models.needle import write_needle  # a model of 6 MB that finds facts in its prompt

FACTS = "The code of Ada is 31-plum.\nThe code of Chen is 07-jade.\n"

with tempfile.TemporaryDirectory() as folder, LLM(str(write_needle(Path(folder))), max_model_len=1024) as llm:
    prompts = [f"{FACTS}The code of {name} is" for name in ("Ada", "Chen")]
    for output in llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=32)):
        print("The answer is" + output.outputs[0].text)
