"""Ids of the prefixes of token sequences, for the prefix cache (:mod:`medha.sched.prefix`).

The id of the first n units of a sequence is a keyed hash of its tokens and of the salts, 128 bits, made for all n at
once by numpy. The key is drawn when the engine is made and never leaves it. Both steps are multilinear modulo 2^64
(Lemire and Kaser, arXiv 1202.4961): a unit's tokens give two numbers of 32 bits, and these, each times a number drawn
for its position, are added up from the first unit on in two sums. Two sequences of one length that differ, or whose
salts do, have the same id with a probability of about 2^-64, whatever they are, to whoever does not know the key.
"""

from __future__ import annotations

import hashlib
import os

import numpy as np
import numpy.typing as npt

from medha.sched.prefix import ID_BYTES

_PIECE = 4096  # units whose numbers are drawn together
_HALF = np.uint64(32)


class PrefixIds:
    """Makes the ids of one engine's requests, one each ``unit`` tokens; ``key`` is secret, drawn by default."""

    def __init__(self, unit: int, key: bytes | None = None) -> None:
        self.unit = unit
        self._key = os.urandom(32) if key is None else key
        self._of_tokens = self._drawn("tokens", (unit, 2))
        self._of_lengths = self._drawn("length", (2,))
        self._of_units: dict[int, npt.NDArray[np.uint64]] = {}  # by piece [units, 2 halves, 2 sums]

    def of(self, token_ids: npt.NDArray[np.int32], *salts: str) -> bytes:
        """The ids of a sequence from its beginning; sequences of other ``salts`` have other ids."""
        start = hashlib.blake2b(repr(salts).encode(), digest_size=ID_BYTES, key=self._key).digest()
        return self.further(start, 0, token_ids)

    def further(self, last: bytes, num_units: int, token_ids: npt.NDArray[np.int32]) -> bytes:
        """The ids behind the first ``num_units`` units, the last of which has the id ``last``, of the tokens that
        follow; those that fill no unit have none."""
        ids = []
        sums = np.frombuffer(last, np.uint64)
        count = len(token_ids) // self.unit
        done = 0
        while done < count:
            piece, at = divmod(num_units + done, _PIECE)
            some = min(count - done, _PIECE - at)
            tokens = token_ids[done * self.unit : (done + some) * self.unit].reshape(some, self.unit)
            halves = (tokens.astype(np.uint64) @ self._of_tokens + self._of_lengths) >> _HALF
            terms = (halves[:, :, None] * self._numbers(piece)[at : at + some]).sum(axis=1, dtype=np.uint64)
            terms[0] += sums
            added = np.cumsum(terms, axis=0, dtype=np.uint64)
            ids.append(added.tobytes())
            sums = added[-1]
            done += some
        return b"".join(ids)

    def _numbers(self, piece: int) -> npt.NDArray[np.uint64]:
        if piece not in self._of_units:
            self._of_units[piece] = self._drawn(f"units {piece}", (_PIECE, 2, 2))
        return self._of_units[piece]

    def _drawn(self, what: str, shape: tuple[int, ...]) -> npt.NDArray[np.uint64]:
        seed = hashlib.blake2b(what.encode(), key=self._key).digest()
        random = np.random.Generator(np.random.Philox(int.from_bytes(seed)))
        return random.integers(0, 2**64, shape, np.uint64)
