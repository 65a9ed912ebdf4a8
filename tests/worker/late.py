"""A substitute for the host's pools that are swapped to: copies that are made as late as they may be."""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any

from medha.worker.swap import HostCache, Wait


class Late(HostCache):
    """Copies that are made when the compute that must come after them is launched."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.queued: deque[Callable[[], Wait]] = deque()
        self._num_issued = self._num_done = 0

    def move(self, *runs: Any) -> list[Wait]:
        assert not self.queued, "the compute of every batch comes after all of its copies, and so do later batches"
        return super().move(*runs)

    def _move(self, *what: Any) -> Wait:
        self.queued.append(partial(super()._move, *what))
        self._num_issued += 1
        number = self._num_issued

        def wait() -> None:
            while self._num_done < number:
                self.queued.popleft()()
                self._num_done += 1

        return wait

    def finish(self) -> None:
        while self.queued:
            self.queued.popleft()()
            self._num_done += 1
