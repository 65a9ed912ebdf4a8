"""A lock that threads get in turn."""

import signal
import threading
from contextlib import suppress

from medha.engine.threads import Turns


def test_who_waits_comes_before_who_asks_again() -> None:
    """One asks again as soon as it has given its turn back, and gives it back when the other waits."""
    order, has_turn, waits = list[str](), threading.Event(), threading.Event()
    turns = Turns(lambda: waits.set() if threading.current_thread() is threading.main_thread() else None)

    def loop() -> None:
        for _ in range(20):
            with turns:
                order.append("again")
                has_turn.set()
                if not waits.wait(60.0):
                    return  # it has come before the one who waits
                waits.clear()

    thread = threading.Thread(target=loop)
    thread.start()
    for _ in range(20):
        assert has_turn.wait(60.0)
        has_turn.clear()
        with turns:
            order.append("waiting")
    thread.join()
    assert order == ["again", "waiting"] * 20


def test_wherever_an_interrupt_strikes_it_is_given_back() -> None:
    signal.signal(signal.SIGVTALRM, signal.default_int_handler)
    turns = Turns()

    def enter() -> None:
        with turns:
            pass

    for _ in range(100):
        signal.setitimer(signal.ITIMER_VIRTUAL, 1e-3)
        with suppress(KeyboardInterrupt):
            while True:
                with turns, turns:
                    pass
        other = threading.Thread(target=enter, daemon=True)
        other.start()
        other.join(60.0)
        assert not other.is_alive()
