"""What the needle model must answer, in plain numpy and without the model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from medha.models.needle import EOS_TOKEN_ID, MATCH_LEN, MATCH_WEIGHTS, _byte_codes


def encode_bytes(text: str) -> list[int]:
    """The model's token ids of a text: its UTF-8 bytes."""
    return list(text.encode())


def expected_continuation(ids: Sequence[int], max_tokens: int) -> list[int]:
    """What greedy decoding must give, computed without the model.

    Each next byte is the one at the position whose eight bytes before it agree best with the last eight, counted in
    bits times :data:`MATCH_WEIGHTS`. Before its start a text is continued with its first byte, as layer 1 reads it.

    Returns:
        The ids; fewer than ``max_tokens`` where a newline (``EOS_TOKEN_ID``) ended them, which is then the last.

    Raises:
        ValueError: the best matches continue in different ways.
    """
    # Position p of the text stands at MATCH_LEN + p.
    tokens = np.empty(MATCH_LEN + len(ids) + max_tokens, dtype=np.uint8)
    tokens[:MATCH_LEN] = ids[0]
    tokens[MATCH_LEN : MATCH_LEN + len(ids)] = ids
    agreement = _bit_agreement()
    continuation: list[int] = []
    for end in range(MATCH_LEN + len(ids), len(tokens)):
        scores = np.zeros(end - MATCH_LEN, dtype=np.int16)
        for back, weight in enumerate(MATCH_WEIGHTS):
            keys = tokens[MATCH_LEN - 1 - back : end - 1 - back]
            scores += (weight * agreement[tokens[end - 1 - back]])[keys]
        candidates = np.unique(tokens[MATCH_LEN:end][scores == scores.max()])
        if len(candidates) > 1:
            raise ValueError(f"token {end - MATCH_LEN} is ambiguous: {candidates.tolist()}")
        tokens[end] = candidates[0]
        continuation.append(int(candidates[0]))
        if continuation[-1] == EOS_TOKEN_ID:
            break
    return continuation


def _bit_agreement() -> npt.NDArray[np.int16]:
    """Bits that agree less bits that differ, for each two bytes: int16 [256, 256]."""
    codes = _byte_codes().numpy().astype(np.int16)
    return codes @ codes.T
