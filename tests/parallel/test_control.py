"""What crosses ranks comes back as it went: messages of the control stream, in one frame or in several, where garbage
is an error; beside batches sampling state, sampled tokens, errors."""

import json
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import medha.parallel.control as control
from medha import errors
from medha.batch import Batch, Row
from medha.engine import wire
from medha.errors import MedhaError, PlanDivergenceError, RequestError
from medha.parallel.control import ControlReceiver, ControlSender, Message, decode, encode
from medha.params import SamplingParams
from medha.worker.sampling import Sampled, SlotSampling
from medha.worker.step import StepResult
from tests.parallel.rendezvous import Group, Transport
from tests.test_batch import BATCHES

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


@settings(deadline=None, max_examples=40, database=None)
@given(st.lists(MESSAGES.filter(lambda m: m.kind != "stop"), max_size=5), st.integers(3, 40), st.integers(0, 99))
@example([Message("call", {"name": "é"}), Message("batch", {}, Batch(0, ()))], 3, 0)
def test_stream_in_frames(messages: list[Message], frame_ints: int, seed: int) -> None:
    """Cut into frames of any size and sent over the model of a transport, messages arrive whole and in order."""
    messages = [*messages, Message("stop")]
    transport = Transport(seed)
    arrived: list[Message] = []
    with transport.installed(2), pytest.MonkeyPatch.context() as patch:
        patch.setattr(control, "FRAME_INTS", frame_ints)

        groups: list[Any] = [Group("control", rank, (0, 1)) for rank in (0, 1)]

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
    assert str(caught.value) == f"batch {ints[5]}: rank 0 sent a plan with digest {sent:08x}, {arrived:08x} has arrived"


# -- beside batches ---------------------------------------------------------------------------------------------

IDS = st.integers(0, 2**31 - 1)
FLOATS = st.floats(allow_nan=False)
FLOAT32 = st.floats(width=32, allow_nan=False)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 99),
    temperature=st.none() | st.floats(0, 2),
    top_k=st.none() | st.integers(0, 50),
    top_p=st.none() | st.floats(0.1, 1.0),
    min_p=st.none() | st.floats(0, 1),
    repetition_penalty=st.none() | st.floats(0.5, 2),
    presence_penalty=st.floats(-2, 2),
    seed=st.none() | st.integers(0, 2**63 - 1),
    stop=st.none() | st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=2),
    stop_token_ids=st.none() | st.lists(IDS, max_size=3),
    logit_bias=st.none() | st.dictionaries(IDS, st.floats(-100, 100), max_size=3),
    allowed_token_ids=st.none() | st.lists(IDS, min_size=1, max_size=3),
    logprobs=st.none() | st.integers(0, 5),
    ignore_eos=st.booleans(),
)


def through_json(value: Any) -> Any:
    return json.loads(json.dumps(value))


@given(
    IDS,
    PARAMS,
    st.integers(0, 2**64),
    st.lists(IDS, max_size=3).map(tuple),
    st.lists(st.integers(0, 300), min_size=1, max_size=9),
    st.lists(IDS, max_size=4),
)
def test_sampling_state(
    slot: int, params: SamplingParams, seed: int, end_ids: tuple[int, ...], ids: list[int], output_ids: list[int]
) -> None:
    state = SlotSampling.of(params.resolve({}), seed, end_ids, np.array(ids, np.int32))
    state.output_ids = output_ids
    back_slot, back = wire.decode_sampling(through_json(wire.encode_sampling(slot, state)))
    assert back_slot == slot
    assert (back.params, back.seed, back.end_ids) == (state.params, seed, end_ids)
    assert (back.num_prompt_tokens, back.output_ids) == (len(ids), output_ids)
    if state.params.repetition_penalty == 1.0:
        assert state.prompt_ids is back.prompt_ids is None
    else:
        assert back.prompt_ids.dtype == state.prompt_ids.dtype == torch.int32
        assert back.prompt_ids.tolist() == state.prompt_ids.tolist() == sorted(set(ids))


OURS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, MedhaError)]


@pytest.mark.parametrize("kind", OURS)
def test_every_error_of_ours_keeps_its_class(kind: type[MedhaError]) -> None:
    error = kind("what is wrong")
    facts = {errors.DeadlineError: {"param": "slo.ttft_s", "wait_s": 2.5}, errors.PolicyError: {"policy": "mine"}}
    vars(error).update(facts.get(kind, {}))
    back = wire.error_from_json(through_json(wire.error_to_json(error)))
    assert (type(back), str(back), vars(back)) == (kind, "what is wrong", vars(error))


@pytest.mark.parametrize(
    "error",
    [
        KeyError("x"),
        OSError(2, "gone"),
        type("annotations", (Exception,), {})("y"),
        type("carrying", (Exception,), {"__init__": lambda self: vars(self).update(what=object())})(),
    ],
)
def test_an_error_that_is_not_ours_is_told_in_words(error: Exception) -> None:
    back = wire.error_from_json(through_json(wire.error_to_json(error)))
    assert (type(back), str(back)) == (RequestError, f"{type(error).__name__}: {error}")


@st.composite
def reports(draw: st.DrawFn) -> tuple[StepResult, list[SlotSampling]]:
    wanted = draw(st.lists(st.none() | st.integers(0, 4), max_size=6))
    slots = [SlotSampling(SamplingParams(max_tokens=1, logprobs=num).resolve({}), 0, (), 1) for num in wanted]
    sampled = []
    for num in wanted:
        finite = draw(st.booleans())
        entry = st.tuples(IDS, FLOAT32, st.integers(1, 2**31 - 1))
        given_num = 0 if num is None else draw(st.integers(1, 1 + num))  # fewer where the vocabulary is smaller
        entries = tuple(draw(st.lists(entry, min_size=given_num, max_size=given_num)))
        sampled.append(Sampled(draw(IDS), finite, None if num is None or not finite else entries))
    return StepResult(tuple(Row(i, 5, 1, True, True) for i in range(len(wanted))), sampled, draw(FLOATS)), slots


@given(reports())
def test_reports(report: tuple[StepResult, list[SlotSampling]]) -> None:
    """Both ends know the size from the rows alone; numbers come back bit by bit."""
    result, slots = report
    ints = wire.encode_report(result, slots)
    assert ints.dtype == torch.float64
    assert len(ints) == wire.report_size(result.rows, slots)
    assert wire.decode_report(ints, result.rows, slots) == result
