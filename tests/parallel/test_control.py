"""Messages of the control stream: what is sent is what arrives, in one frame or in several; garbage is an error."""

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import medha.parallel.control as control
from medha.batch import Batch, Extent, Row
from medha.errors import PlanDivergenceError
from medha.parallel.control import ControlReceiver, ControlSender, Message, decode, encode
from tests.parallel.rendezvous import Group, Transport

NUMBERS = st.integers(0, 2**31 - 1)
SMALL = st.integers(0, 2**30)
BATCHES = st.builds(
    Batch,
    NUMBERS,
    st.lists(st.builds(Row, NUMBERS, SMALL, SMALL, st.booleans(), st.booleans(), SMALL, SMALL), max_size=5).map(tuple),
    st.lists(st.builds(Extent, NUMBERS, NUMBERS, NUMBERS, NUMBERS), max_size=5).map(tuple),
    st.lists(NUMBERS, max_size=5).map(tuple),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(control._KINDS),
    st.dictionaries(st.text(), JSON, max_size=3),
    st.none() | BATCHES,
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=40).map(lambda ids: np.array(ids, np.int32)),
)


def same(a: Message, b: Message) -> bool:
    """Messages hold arrays, so they have no ``==``."""
    return (a.kind, a.fields, a.batch) == (b.kind, b.fields, b.batch) and np.array_equal(a.token_ids, b.token_ids)


@given(MESSAGES)
@example(Message("stop"))
@example(Message("call", {"name": "é"}))
@example(Message("batch", {}, Batch(0, ())))
def test_round_trip(message: Message) -> None:
    ints = encode(message)
    assert ints.dtype == np.int32
    assert same(decode(ints), message)


@settings(deadline=None, max_examples=40, database=None)
@given(st.lists(MESSAGES.filter(lambda m: m.kind != "stop"), max_size=5), st.integers(3, 40), st.integers(0, 99))
def test_stream_in_frames(messages: list[Message], frame_ints: int, seed: int) -> None:
    """Cut into frames of any size and sent over the model of a transport, messages arrive whole and in order."""
    messages = [*messages, Message("stop")]
    transport = Transport(seed)
    arrived: list[Message] = []
    with transport.installed(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "FRAME_INTS", frame_ints)

        groups: list[Any] = [Group(transport, "control", rank, (0, 1)) for rank in (0, 1)]

        def send() -> None:
            sender = ControlSender(groups[0], [1])
            for message in messages:
                sender.send(message)
            sender.drain()

        def receive() -> None:
            receiver = ControlReceiver(groups[1], lambda message: message)
            arrived.extend(receiver.receive() for _ in messages)

        transport.spawn("rank 0", send)
        transport.spawn("rank 1", receive)
        transport.run()
    assert all(same(a, b) for a, b in zip(arrived, messages, strict=True))
    assert transport.num_messages == sum(-(-len(encode(m)) // (frame_ints - 2)) for m in messages)


@settings(max_examples=300)
@given(st.lists(st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 9), max_size=30))
def test_garbage_is_an_error_or_a_message(ints: list[int]) -> None:
    """Whatever arrives, only the two errors come of it, and nothing that does not encode to the same again."""
    array = np.array(ints, np.int32)
    try:
        message = decode(array)
    except (ValueError, PlanDivergenceError):
        return
    assert same(decode(encode(message)), message)


@given(MESSAGES, st.data())
def test_a_cut_or_longer_message_is_an_error(message: Message, data: st.DataObject) -> None:
    ints = encode(message)
    cut = data.draw(st.integers(0, len(ints) - 1))
    for wrong in (ints[:cut], np.append(ints, np.int32(7))):
        with pytest.raises(ValueError):
            decode(wrong)


@given(BATCHES, st.lists(st.integers(0, 99), max_size=9), st.data())
def test_a_flipped_bit_in_the_batch_is_a_divergence(batch: Batch, ids: list[int], data: st.DataObject) -> None:
    """Case D7: ranks of a tensor-parallel group would otherwise wait for each other with different shapes."""
    ints = encode(Message("batch", {"open": []}, batch, np.array(ids, np.int32)))
    size = len(batch.to_ints())
    place = control._HEADER + data.draw(st.integers(0, size - 1))
    ints[place] ^= np.int32(1 << data.draw(st.integers(0, 30)))
    sent, arrived = (zlib.crc32(part.tobytes()) for part in (np.asarray(batch.to_ints()), ints[5 : 5 + size]))
    with pytest.raises(PlanDivergenceError) as caught:
        decode(ints)
    assert str(caught.value) == (
        f"batch {ints[5]}: rank 0 sent a plan with digest {sent:08x}, {arrived:08x} has arrived"
    )
