"""Requests that are wrong: the error says what and where, nothing is queued, and the engine goes on."""

import array
import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from medha import LLM, SLO, SamplingParams
from medha.config import SchedulerConfig
from medha.engine.admission import prepare_request
from medha.engine.engine import Engine
from medha.engine.request import ModelLimits
from medha.errors import ContextLengthError, KVCapacityError, ValidationError
from tests.sched.virtual import by_tokens, new_scheduler
from tests.serving import GREEDY, Model, assert_empty, finish, serve_one

POOL_TOKENS = 256
TWO = SamplingParams(max_tokens=2, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(bytes_model: Model) -> Iterator[LLM]:
    options = {"block_size": 16, "num_kv_blocks": POOL_TOKENS // 16, "max_model_len": 400}
    with LLM(bytes_model.folder, **options) as llm:
        yield llm


@pytest.fixture
def engine(llm: LLM) -> Iterator[Engine]:
    """Its engine, in which nothing may be left."""
    yield llm.engine
    assert_empty(llm.engine)


def refused(
    engine: Engine,
    param: str,
    message: str,
    prompt: Any = "good",
    params: Any = None,
    *,
    name: Any = "bad",
    kind: type[ValidationError] = ValidationError,
    **more: Any,
) -> ValidationError:
    """A request is refused with this error, and a good one is served."""
    with pytest.raises(kind, match=message) as caught:
        engine.add_request(name, prompt, params, **more)
    assert (type(caught.value), caught.value.param) == (kind, param)
    assert_empty(engine)
    assert len(serve_one(engine, [1, 2], TWO).outputs[0].token_ids) == 2
    return caught.value


HI = {"role": "user", "content": "hi"}
PROMPTS: dict[str, tuple[Any, str, str]] = {
    "empty text": ("", "prompt", r"^prompt='' has no token; accepted: at least one$"),
    "empty ids": ([], "prompt_token_ids", r"^prompt_token_ids=\[\] has no token; accepted: at least one$"),
    "empty array": (np.array([], dtype=np.int64), "prompt_token_ids", "no token"),
    "negative": ([5, -1], "prompt_token_ids", r"^prompt_token_ids\[1\]=-1; accepted: integers from 0 to 255$"),
    "nested": ({"prompt_token_ids": [[5]]}, "prompt_token_ids", r"^prompt_token_ids\[0\]=\[5\]; accepted"),
    "array field of two axes": ({"prompt_token_ids": np.array([[5]])}, "prompt_token_ids", r"^prompt_token_ids\[0\]="),
    "array without values": (torch.empty(3, dtype=torch.int64, device="meta"), "prompt_token_ids", "cannot be read"),
    "array as text": ({"prompt": np.array([1])}, "prompt", "^prompt of type ndarray; accepted: text$"),
    "array field of no axis": ({"prompt_token_ids": np.array(5)}, "prompt_token_ids", "of type ndarray; accepted"),
    "text as ids": ({"prompt_token_ids": "hello"}, "prompt_token_ids", "of type str; accepted"),
    "two forms": ({"prompt": "a", "prompt_token_ids": [1]}, "prompt", "^prompt and prompt_token_ids; accepted: one of"),
    "no form": ({}, "prompt", "^no prompt; accepted: one of prompt, prompt_token_ids, messages$"),
    "unknown field": ({"prompt": "a", "multi_modal_data": 1}, "prompt", "^prompt and multi_modal_data; accepted"),
    "no messages": ({"messages": []}, "messages", "non-empty list"),
    "mapping as messages": ({"messages": {"role": "user"}}, "messages", "^messages of type dict; accepted: a list"),
    "tools beside text": ({"prompt": "a", "tools": [{}]}, "tools", "^tools beside prompt; accepted: beside messages$"),
    "tools that are none": ({"messages": [HI], "tools": 5}, "tools", "^tools=5; accepted: a"),
    "message without role": ({"messages": [{"content": "hi"}]}, "messages", "role"),
    "lone surrogate": ("a\ud800", "prompt", "lone surrogate"),
    "too long": ([1] * 400, "prompt", "^the prompt has 400 tokens; accepted: fewer than max_model_len=400$"),
    "larger than the pool": ([1] * 300, "prompt", "^300 prompt tokens and max_tokens=16 need 315 tokens of KV cache;"),
}
KINDS = {"too long": ContextLengthError, "larger than the pool": KVCapacityError}
for _ids, _at, _shown in (
    ([300, True], 0, "300"),
    ([1, True, 300], 1, "True"),
    ([1, 2**70], 1, 2**70),
    (np.array([1, 2, 256, -1]), 2, "256"),
    (np.array([1, 2**63], np.uint64), 1, 2**63),
    (torch.tensor([1, -7]), 1, "-7"),
    (torch.tensor([1.5], dtype=torch.bfloat16), 0, "1.5"),
):
    _message = rf"^prompt_token_ids\[{_at}\]={_shown}; accepted: int"
    PROMPTS[f"id {_shown}"] = ({"prompt_token_ids": _ids}, "prompt_token_ids", _message)


@pytest.mark.parametrize("case", PROMPTS)
def test_bad_prompt(llm: LLM, engine: Engine, case: str) -> None:
    (prompt, param, message), kind = PROMPTS[case], KINDS.get(case, ValidationError)
    error = refused(engine, param, message, prompt, kind=kind)
    assert kind is ValidationError or error.value == len(prompt)
    if case not in ("empty ids", "empty array"):  # to LLM those are a list of no prompts
        with pytest.raises(ValidationError, match=message) as caught:
            llm.generate(prompt)
        assert (caught.value.param, caught.value.index) == (param, 0)
    with pytest.raises(ValidationError, match=rf"^prompt 1: .*{message.removeprefix('^')}") as caught:
        llm.generate(["good", prompt])
    assert (type(caught.value), caught.value.index) == (kind, 1)
    with pytest.raises(ValidationError, match=message):
        llm.stream(prompt)


@pytest.mark.parametrize(
    "make",
    [
        *(list, tuple, array.array, np.array, torch.tensor, partial(np.array, dtype=np.uint8), torch.IntTensor),
        lambda ids: list(np.array(ids)),
        lambda ids: list(np.array(ids, dtype=np.uint8)),
    ],
)
def test_ids_become_an_array_of_our_own(engine: Engine, make: Any) -> None:
    ids = [5, 0, 255, 5]
    given = make("q", ids) if make is array.array else make(ids)
    request = engine.prepare("r", given)
    assert request.prompt_ids.dtype == np.int32
    assert request.prompt_token_ids == ids
    assert type(request.prompt_token_ids) is list and type(request.prompt_token_ids[0]) is int
    assert request.prompt_token_ids is request.prompt_token_ids
    if not isinstance(given, tuple):
        given[0] = 9
        assert request.prompt_ids.tolist() == request.prompt_token_ids == ids  # a copy: the caller may change his


@pytest.mark.parametrize("value", [None, 5, b"hello", {1, 2}, iter(["a"]), np.array(["a", "b"])], ids=type)
def test_not_a_prompt_at_all(llm: LLM, engine: Engine, value: Any) -> None:
    name = type(value).__name__
    refused(engine, "prompt_token_ids", f"of type {name}; accepted: a list of token ids, or text", value)
    with pytest.raises(ValidationError, match=f"prompts of type {name}; accepted: a prompt or a list of prompts"):
        llm.generate(value)


@pytest.mark.parametrize(
    ("length", "max_tokens", "param"), [(10, 248, "max_tokens"), (250, 8, "max_tokens"), (257, 1, "prompt")]
)
def test_request_that_never_fits_the_pool(engine: Engine, length: int, max_tokens: int, param: str) -> None:
    params = SamplingParams(max_tokens=max_tokens)
    error = refused(engine, param, "^", [1] * length, params, kind=KVCapacityError)
    asked = f" and max_tokens={max_tokens}" if max_tokens > 1 else ""
    assert str(error) == (
        f"{length} prompt tokens{asked} need 257 tokens of KV cache; "
        "accepted: at most 256, or more with a larger kv_memory"
    )
    assert error.value == (max_tokens if param == "max_tokens" else length)
    fitting = SamplingParams(temperature=0.0, max_tokens=max_tokens - 1 or 1)
    assert serve_one(engine, [1] * (256 - fitting.max_tokens + 1), fitting).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("name", ["", None, 5, [1]])
def test_bad_request_id(engine: Engine, name: Any) -> None:
    refused(engine, "request_id", "request_id", name=name)
    for method in (engine.abort, engine.explain) if name != "" else ():
        with pytest.raises(ValidationError, match=r"^request_id=.*; accepted: str$"):
            method(name)


@pytest.mark.parametrize("arrival_s", [math.nan, -math.inf, "0", 10**400, 10**5000, [], True, 1e9], ids=range(8))
def test_an_arrival_that_is_no_time_changes_nothing(engine: Engine, arrival_s: Any) -> None:
    engine.add_request("before", "good", GREEDY)
    accepted = r"at most now\(\), \d" if arrival_s == 1e9 else "seconds, a finite number$"
    with pytest.raises(ValidationError, match=f"^arrival_s=.*; accepted: {accepted}") as caught:
        engine.add_request("bad", "good", GREEDY, arrival_s=arrival_s)
    assert caught.value.param == "arrival_s"
    engine.add_request("after", "good", GREEDY, arrival_s=-1)
    assert {i: len(output.outputs[0].token_ids) for i, output in finish(engine).items()} == {"before": 16, "after": 16}


def test_bad_parameters(llm: LLM, engine: Engine) -> None:
    for bad in ({"temperature": 0}, 0, "greedy"):
        refused(engine, "sampling_params", "accepted: SamplingParams", params=bad)
    for bad in ({"ttft_s": 1}, 0.5):
        refused(engine, "slo", "accepted: SLO", slo=bad)
        with pytest.raises(ValidationError, match="accepted: SLO"):
            llm.generate("good", slo=bad)
    for bad in ("urgent", "", 0, False):
        refused(engine, "priority", "accepted: one of", priority=bad)
        with pytest.raises(ValidationError, match=f"^priority={bad!r}; accepted: one of realtime"):
            llm.generate("good", priority=bad)  # type: ignore[arg-type]
    assert [one.error for one in llm.generate(["good", "b"], TWO, priority=["low", None])] == [None, None]  # type: ignore[list-item]
    for name, bad in (("stop_token_ids", [3, 256]), ("allowed_token_ids", [1, 256]), ("logit_bias", {256: 1.0})):
        message = rf"{name}\[{len(bad) - 1}\]=256; accepted: integers from 0 to 255"
        refused(engine, name, message, params=SamplingParams(**{name: bad}))


def test_min_tokens_that_hold_every_id_back(engine: Engine) -> None:
    every = list(range(256))
    for rest in ({"stop_token_ids": every}, {"allowed_token_ids": [5], "stop_token_ids": [5, 6]}):
        params = SamplingParams(min_tokens=1, **rest)
        refused(engine, "min_tokens", r"^min_tokens=1 leaves nothing to draw", params=params)
    params = SamplingParams(temperature=0.0, min_tokens=1, stop_token_ids=every[:-1])
    assert serve_one(engine, "good", params).outputs[0].token_ids[0] == 255
    assert serve_one(engine, "good", SamplingParams(stop_token_ids=every)).outputs[0].finish_reason == "stop"


@pytest.mark.parametrize("field", ["sampling_params", "slo"])
@pytest.mark.parametrize("count", [0, 1, 3])
@pytest.mark.usefixtures("engine")
def test_lists_of_different_length(llm: LLM, field: str, count: int) -> None:
    values = {field: [SamplingParams() if field == "sampling_params" else SLO()] * count}
    with pytest.raises(ValidationError, match=rf"^{count} {field} for 2 prompts; accepted: one, or 2$") as caught:
        llm.generate(["a", "b"], **values)  # type: ignore[arg-type]
    assert caught.value.param == field


def test_the_kv_capacity_of_groups() -> None:
    """Two groups, each of which takes up to 32 tokens of a request, though its pool has 256."""
    config = SchedulerConfig("sarathi", max_kv_per_group=32)
    scheduler = new_scheduler(config, num_blocks=16, num_groups=2, predictor=by_tokens())
    given: Any = {"slo": None, "limits": ModelLimits(256, 999), "tokenizer": None, "kv": scheduler.memory}
    with pytest.raises(KVCapacityError) as caught:
        prepare_request("bad", [1] * 65, None, **given)
    assert str(caught.value) == (
        "65 prompt tokens and max_tokens=16 need 80 tokens of KV cache; "
        "accepted: at most 64, 32 on each of 2 groups, or more with a larger max_kv_per_group"
    )


@pytest.mark.parametrize(("length", "room"), [(10, 247), (256, 1)])
def test_max_tokens_of_none_is_what_there_is_room_for(engine: Engine, length: int, room: int) -> None:
    """The KV pool takes 256 tokens, and the last one drawn is never written; the context of 400 would take more."""
    params = SamplingParams(temperature=0.0, max_tokens=None)
    completion = serve_one(engine, [1] * length, params).outputs[0]
    assert (len(completion.token_ids), completion.finish_reason) == (room, "length")
    refused(engine, "prompt", "257 prompt tokens", [1] * 257, SamplingParams(max_tokens=None), kind=KVCapacityError)


@pytest.mark.parametrize(
    ("prompt", "params", "param"),
    [
        ("text", None, "prompt"),
        ({"prompt": "text"}, None, "prompt"),
        ({"messages": [HI]}, None, "messages"),
        ([1, 2], SamplingParams(stop="x"), "stop"),
    ],
)
def test_text_without_a_tokenizer(bytes_model: Model, prompt: Any, params: SamplingParams | None, param: str) -> None:
    engine = bytes_model.engine(with_tokenizer=False)
    refused(engine, param, rf"^{param} needs a tokenizer, and the model has none", prompt, params)
    assert serve_one(engine, [1, 2]).outputs[0].text is None


def test_chat_without_a_template(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine.tokenizer, "chat_template", None)
    refused(engine, "messages", "has no chat template", {"messages": [HI]})


@pytest.mark.parametrize("messages", ["hi", HI, [[]], [["hi"]], [[{"role": "user"}]], [5]])
@pytest.mark.usefixtures("engine")
def test_bad_messages(llm: LLM, messages: Any) -> None:
    with pytest.raises(ValidationError) as caught:
        llm.chat(messages)
    assert (caught.value.param, caught.value.index) == ("messages", 0)


def test_refused_requests_leave_the_seeds_alone(bytes_model: Model) -> None:
    params = SamplingParams(temperature=1.0, max_tokens=4)
    clean, dirty = bytes_model.engine(), bytes_model.engine()
    with pytest.raises(ValidationError):
        dirty.add_request("bad", [-1], params)
    assert serve_one(clean, [1], params).outputs == serve_one(dirty, [1], params).outputs
