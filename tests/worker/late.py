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

    def move(self, *runs: Any) -> list[Wait]:
        assert not self.queued, "the compute of every batch comes after all of its copies, and so do later batches"
        return super().move(*runs)

    def _move(self, *what: Any) -> Wait:
        copy = partial(super()._move, *what)
        self.queued.append(copy)

        def wait() -> None:
            while copy in self.queued:
                self.queued.popleft()()

        return wait

    def finish(self) -> None:
        while self.queued:
            self.queued.popleft()()
