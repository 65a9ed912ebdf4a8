"""A substitute for the stream that swaps: copies that are made as late as they may be."""

from collections import deque
from collections.abc import Callable


class Late:
    """Copies that are made when the compute that must come after them is launched."""

    def __init__(self) -> None:
        self.queued: deque[Callable[[], None]] = deque()
        self._num_issued = self._num_done = 0

    def begin(self) -> None:
        assert not self.queued, "the compute of every batch comes after all of its copies, and so do later batches"

    def issue(self, copies: Callable[[], None]) -> Callable[[], None]:
        self.queued.append(copies)
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
