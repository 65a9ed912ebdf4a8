"""The arrays of a step travel in one buffer and arrive as they were."""

import numpy as np
import torch
from hypothesis import given, settings, strategies as st

from medha.attention.staging import packed_bytes, to_device

CPU = torch.device("cpu")
ints = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=9)


@settings(max_examples=40, derandomize=True, deadline=None)
@given(parts=st.lists(st.tuples(ints, st.sampled_from([np.int32, np.int64]), st.integers(1, 3))), into=st.booleans())
def test_every_array_arrives_in_its_dtype(parts: list[tuple[list[int], type, int]], into: bool) -> None:
    arrays = [np.array(values, dtype)[::step] for values, dtype, step in parts]
    size = packed_bytes(arrays)
    buffer = torch.full((size + 8,), 255, dtype=torch.uint8) if into else None
    for array, tensor in zip(arrays, to_device(arrays, CPU, into=buffer), strict=True):
        assert tensor.tolist() == array.tolist() and tensor.dtype == torch.from_numpy(array).dtype
        if buffer is not None:
            assert tensor.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
            assert tensor.storage_offset() * tensor.itemsize % 16 == 0
    assert buffer is None or bool((buffer[size:] == 255).all())
