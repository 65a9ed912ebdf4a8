"""The integers of a step travel in one buffer and arrive as they were."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from medha.attention.staging import Staging, record_event

CPU = torch.device("cpu")
ints = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(parts=st.lists(st.tuples(ints, st.sampled_from([np.int32, np.int64]))), into=st.booleans())
def test_every_part_arrives_in_its_dtype(parts: list[tuple[list[int], type]], into: bool) -> None:
    staging = Staging(CPU)
    staged = [staging.add(np.array(values, dtype)) for values, dtype in parts]
    buffer = torch.full((staging.num_bytes + 8,), 255, dtype=torch.uint8) if into else None
    staging.send(into=buffer)
    for (values, dtype), part in zip(parts, staged, strict=True):
        assert part.tensor.tolist() == values
        assert part.tensor.dtype == (torch.int32 if dtype is np.int32 else torch.int64)
        assert part.bytes.start % 16 == 0
        if buffer is not None and values:
            assert part.tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
    assert buffer is None or bool((buffer[staging.num_bytes :] == 255).all())
    assert len({part.tensor.untyped_storage().data_ptr() for part in staged if len(part.ints)}) <= 1


def test_strided_integers_are_copied_as_they_read() -> None:
    staging = Staging(CPU)
    part = staging.add(np.arange(12, dtype=np.int64).reshape(3, 4)[:, 1])
    staging.send()
    assert part.tensor.tolist() == [1, 5, 9]


def test_what_was_not_sent_is_not_there() -> None:
    with pytest.raises(AssertionError, match="sent before it is used"):
        _ = Staging(CPU).add(np.zeros(3, np.int64)).tensor


def test_a_buffer_that_is_too_short() -> None:
    staging = Staging(CPU)
    staging.add(np.zeros(3, np.int64))
    with pytest.raises(RuntimeError):
        staging.send(into=torch.empty(8, dtype=torch.uint8))


def test_the_cpu_is_never_behind() -> None:
    assert record_event(CPU) is None
