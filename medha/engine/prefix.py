"""Ids of the prefixes of token sequences, for the prefix cache (:mod:`medha.sched.prefix`).

The id of the first n units of a sequence is a keyed hash, 128 bits of BLAKE2b, of the id of those before the last one
and of the last one's tokens; the first one follows the hash of the salts. The key is drawn when the engine is made and
never leaves it. Two sequences that differ, or whose salts do, have the same id with a probability of about 2^-128.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
import numpy.typing as npt

from medha.engine.threads import pieces
from medha.sched.prefix import ID_BYTES


class PrefixIds:
    """Makes the ids of one engine's requests, one each ``unit`` tokens; ``key`` is secret, drawn by default."""

    def __init__(self, unit: int, key: bytes | None = None) -> None:
        self.unit = unit
        self._key = os.urandom(32) if key is None else key

    def of(self, token_ids: npt.NDArray[np.int32], *salts: str) -> bytes:
        """The ids of a sequence from its beginning; sequences of other ``salts`` have other ids."""
        return self.further(self._hash(repr(salts).encode()), token_ids)

    def further(self, last: bytes, token_ids: npt.NDArray[np.int32]) -> bytes:
        """The ids behind the units the last of which has the id ``last``, of the tokens that follow; those that fill no
        unit have none."""
        data, size, ids = token_ids.tobytes(), self.unit * token_ids.itemsize, []
        for part in pieces(len(data) // size):
            for unit in range(part.start, part.stop):
                last = self._hash(last + data[unit * size : (unit + 1) * size])
                ids.append(last)
        return b"".join(ids)

    def _hash(self, data: bytes) -> bytes:
        return hashlib.blake2b(data, digest_size=ID_BYTES, key=self._key).digest()
