"""A lock that threads get in turn."""

import threading
import time

from medha.engine.turns import Turns


def test_it_is_re_entrant_and_one_threads_alone() -> None:
    turns, inside, most = Turns(), [], []

    def work() -> None:
        for _ in range(200):
            with turns:
                inside.append(1)
                with turns:
                    time.sleep(0)
                    most.append(len(inside))
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 1600


def test_who_waits_comes_before_who_asks_again() -> None:
    turns, num_turns, stop = Turns(), [0], threading.Event()

    def loop() -> None:
        while not stop.is_set():
            with turns:
                num_turns[0] += 1
                time.sleep(0.001)

    thread = threading.Thread(target=loop)
    thread.start()
    try:
        for _ in range(20):
            asked = num_turns[0]
            with turns:
                assert num_turns[0] - asked <= 2
    finally:
        stop.set()
        thread.join()
