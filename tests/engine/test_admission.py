"""Prompt ids become an array of the request's own; the first wrong one is named."""

import array
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from medha.config import SchedulerConfig
from medha.engine.admission import prepare_request
from medha.engine.request import ModelLimits
from medha.params import SamplingParams
from medha.sched.memory import KVMemory


def prepared(prompt: Any, **params: Any) -> Any:
    return prepare_request(
        "r",
        prompt,
        SamplingParams(max_tokens=1, **params),
        slo=None,
        limits=ModelLimits(256, 1 << 20),
        tokenizer=None,
        kv=KVMemory(SchedulerConfig(), num_blocks=1 << 12, block_size=256),
    )


@pytest.mark.parametrize(
    "make", [list, tuple, array.array, np.array, torch.tensor, partial(np.array, dtype=np.uint8), torch.IntTensor]
)
def test_ids_become_an_array_of_our_own(make: Any) -> None:
    ids = [5, 0, 255, 5]
    given = make("q", ids) if make is array.array else make(ids)
    request = prepared(given)
    assert request.prompt_ids.dtype == np.int32
    assert request.prompt_token_ids == ids
    assert type(request.prompt_token_ids) is list and type(request.prompt_token_ids[0]) is int
    assert request.prompt_token_ids is request.prompt_token_ids
    if not isinstance(given, tuple):
        given[0] = 9
        assert request.prompt_ids.tolist() == request.prompt_token_ids == ids  # a copy: the caller may change his


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
