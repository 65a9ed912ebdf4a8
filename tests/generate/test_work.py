"""What a command is asked to serve, before anything is loaded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from medha.errors import ConfigError
from medha.generate.work import requests_of


@pytest.mark.parametrize(
    ("name", "lines"),
    [
        ("medha", [{"id": "a", "arrival_s": 0.5, "num_prompt_tokens": 5, "num_output_tokens": 5}]),
        ("mooncake", [{"timestamp": 0, "input_length": 5, "output_length": 5}]),
        ("vidur", ["arrived_at,num_prefill_tokens,num_decode_tokens", "0,5,5"]),
    ],
)
def test_a_trace_is_no_request_file(tmp_path: Path, name: str, lines: list[Any]) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    with pytest.raises(ConfigError, match=rf"is a trace \(format {name}\).* serve --dataset-path .*r\.jsonl"):
        requests_of(path, {}, seed=0)
