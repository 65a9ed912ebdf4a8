"""What is public: the names of ``medha``, their methods' signatures, their fields. Whatever is not here may change."""

import dataclasses
import inspect
from typing import Any

import pytest

import medha

SIGNATURES = {
    "LLM.__init__": "model, *, timeline=None, journal=None, **options",
    **dict.fromkeys(("LLM.follow", "LLM.get_tokenizer", "LLM.reset_prefix_cache", "LLM.close"), ""),
    "LLM.generate": "prompts, sampling_params=None, *, slo=None, priority='normal', tenant='', use_tqdm=True",
    "LLM.chat": (
        "messages, sampling_params=None, *, slo=None, priority='normal', tenant='', use_tqdm=True, "
        "add_generation_prompt=True, tools=None, chat_template_kwargs=None"
    ),
    "LLM.stream": "prompt, sampling_params=None, *, slo=None, priority='normal', tenant=''",
    "LLM.get_default_sampling_params": "",
    **dict.fromkeys(("Engine.describe", "Engine.now", "Engine.abort_all", "Engine.reset_prefix_cache"), ""),
    "Engine.prefills": "min_tokens=1",
    "Engine.record": "journal",
    "Engine.explain": "request_id",
    "Engine.add_request": "request_id, prompt, params=None, *, slo=None, priority='normal', tenant='', arrival_s=None",
    "Engine.abort": "request_id",
    "Engine.step": "wait_s=None",
    "SamplingParams.resolve": "defaults",
    "SamplingParams.capped": "max_tokens",
    "SamplingParams.reported": "output_kind",
    "SamplingParams.from_dict": "fields",
}
PROPERTIES = ("LLM.engine", "LLM.is_driver", "Engine.has_unfinished", "Engine.num_unfinished")
FIELDS = {
    "SLO": "ttft_s tpot_s",
    "CompletionOutput": "index text token_ids finish_reason stop_reason logprobs cumulative_logprob",
    "Logprob": "logprob rank decoded_token",
    "RequestMetrics": (
        "arrival first_scheduled first_token finished num_prompt_tokens num_output_tokens num_chunks "
        "num_preemptions num_swaps work_lost_s ttft_slo_s tpot_slo_s deadline_s deadline_is_derived "
        "is_relegated explanation num_completions num_cached_tokens"
    ),
    "RequestOutput": "request_id prompt prompt_token_ids outputs finished metrics error num_cached_tokens",
    "SamplingParams": (
        "n temperature top_p top_k min_p presence_penalty frequency_penalty repetition_penalty seed stop "
        "stop_token_ids logit_bias allowed_token_ids ignore_eos min_tokens max_tokens logprobs detokenize "
        "skip_special_tokens include_stop_str_in_output output_kind"
    ),
}


def signature(name: str) -> str:
    owner, _, method = name.partition(".")
    found = inspect.getattr_static(getattr(medha, owner), method)
    whole = inspect.signature(getattr(found, "__func__", found))
    bare = [one.replace(annotation=one.empty) for one in whole.parameters.values()]
    return str(whole.replace(parameters=bare[1:], return_annotation=whole.empty))[1:-1]


def test_names() -> None:
    assert set(medha.__all__) == {*FIELDS, "LLM", "Engine"}
    assert set(medha.__all__) <= set(dir(medha))
    for name in medha.__all__:
        thing = getattr(medha, name)
        assert (thing.__name__, thing.__module__.split(".")[0]) == (name, "medha")
        assert thing.__doc__
    with pytest.raises(AttributeError, match=r"^module 'medha' has no attribute 'Nothing'$"):
        medha.Nothing  # noqa: B018


def test_signatures_and_properties() -> None:
    assert {name: signature(name) for name in SIGNATURES} == SIGNATURES
    for name in PROPERTIES:
        owner, _, attribute = name.partition(".")
        assert isinstance(inspect.getattr_static(getattr(medha, owner), attribute), property)


@pytest.mark.parametrize("name", FIELDS)
def test_fields(name: str) -> None:
    cls: Any = getattr(medha, name)
    assert [field.name for field in dataclasses.fields(cls)] == FIELDS[name].split()
