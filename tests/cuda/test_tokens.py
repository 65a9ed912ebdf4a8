"""medha on the emulated device: the CPU's tokens, and no wait of the host in a steady step."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cuda.device import Device
from tests.cuda.serving import Served, serve


@pytest.mark.parametrize("decode_lag", [0, 1])
@pytest.mark.parametrize("cuda_graphs", [True, False])
def test_tokens_are_the_cpus(model: Path, expected: Served, device: Device, cuda_graphs: bool, decode_lag: int) -> None:
    assert serve(model, device="cuda", cuda_graphs=cuda_graphs, decode_lag=decode_lag) == expected
