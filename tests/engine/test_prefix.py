"""The prefix cache from the front door: the same tokens with and without it, and what is not computed again."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from medha import LLM, SamplingParams
from medha.engine.prefix import PrefixIds
from medha.engine.replay import replay
from medha.errors import ConfigError, NonFiniteLogitsError, ValidationError
from tests.engines import poison
from tests.serving import GREEDY, Model, finish, random_ids

OPTIONS: dict[str, Any] = {"quantum_s": 0.25, "num_kv_blocks": 48, "block_size": 64, "chunk_size": 128}


def make(model: Model, **options: Any) -> LLM:
    return LLM(str(model.folder), **OPTIONS | options)


@pytest.mark.parametrize("changes", [{"n": 3, "temperature": 1.0, "seed": 5}, {"repetition_penalty": 5.0}], ids=str)
def test_what_is_cached_is_counted_by_penalties_and_drawn_as_without_it(
    bytes_model: Model, changes: dict[str, Any]
) -> None:
    prompt, params = {"prompt_token_ids": random_ids(1200, seed=3)}, replace(GREEDY, ignore_eos=True, **changes)
    with make(bytes_model) as llm:
        found = [llm.generate(prompt, params)[0] for _ in range(2)]
    with make(bytes_model, enable_prefix_caching=False) as llm:
        found += [llm.generate(prompt, params)[0] for _ in range(2)]
    assert [output.num_cached_tokens for output in found[1:]] == [1184, 0, 0]
    tokens = [[one.token_ids for one in output.outputs] for output in found]
    assert tokens == tokens[:1] * 4


def test_a_chat_computes_what_is_new(bytes_model: Model) -> None:
    """Issue: at most 16 tokens a turn above the new ones, over 20 turns with their answers."""
    history: list[int] = []
    with make(bytes_model, num_kv_blocks=64) as llm:
        for turn in range(20):
            history += random_ids(40, seed=turn)
            params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
            (output,) = llm.generate({"prompt_token_ids": history}, params)
            new = 40 + (turn > 0)  # the last token of an answer was drawn and never read
            assert len(history) - output.num_cached_tokens <= new + 15
            history += output.outputs[0].token_ids


def test_salts_and_tenants_keep_apart_and_a_reset_forgets_all(bytes_model: Model, tmp_path: Path) -> None:
    """As a journal replays, each of whose lines is there as soon as it is written."""
    ids, journal = random_ids(200, seed=6), tmp_path / "journal"
    with make(bytes_model, journal=journal) as llm:

        def cached(salt: str | None = None, tenant: str = "") -> int:
            prompt = {"prompt_token_ids": ids, "cache_salt": salt}
            return llm.generate(prompt, GREEDY, tenant=tenant)[0].num_cached_tokens

        assert [cached(), cached(), cached("a"), cached("a"), cached("b")] == [0, 192, 0, 192, 0]
        assert [cached(tenant="t"), cached(tenant="t"), cached("a", "t")] == [0, 192, 0]
        llm.reset_prefix_cache()
        assert cached() == 0 and replay(journal).mismatch is None
        with pytest.raises(ValidationError, match="cache_salt=5"):
            cached(5)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="a journal begins before the first request"):
            llm.engine.record(io.StringIO())


def test_an_aborted_request_goes_on_where_it_was(bytes_model: Model) -> None:
    """Issue: a client that left at 60 % of a prompt computes 40 % and a block."""
    ids = random_ids(2000, seed=7)
    with make(bytes_model) as llm:
        engine = llm.engine
        engine.add_request("left", {"prompt_token_ids": ids}, GREEDY)
        while not (found := engine.prefills()) or found[0][1] < 1200:
            engine.step()
        engine.abort("left")
        engine.add_request("back", {"prompt_token_ids": ids}, GREEDY)
        assert 2000 - finish(engine)["back"].num_cached_tokens <= 800 + 64


def test_what_led_to_bad_logits_is_not_shared(bytes_model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = random_ids(200, seed=9)
    with make(bytes_model) as llm, monkeypatch.context() as patch:
        poison(patch, seed=3, index=2, value=float("nan"))
        params = SamplingParams(temperature=1.0, seed=3, max_tokens=8)
        assert isinstance(llm.generate({"prompt_token_ids": ids}, params)[0].error, NonFiniteLogitsError)
        assert [llm.generate({"prompt_token_ids": ids}, GREEDY)[0].num_cached_tokens for _ in range(2)] == [0, 192]


def test_ids_name_all_tokens_up_to_there() -> None:
    ids, rng = PrefixIds(16), np.random.default_rng(0)
    tokens = rng.integers(0, 50, 70_000).astype(np.int32)
    chain = ids.of(tokens, "salt")
    assert len(chain) == 16 * (70_000 // 16)
    known = {chain[i : i + 16] for i in range(0, len(chain), 16)}
    assert len(known) == len(chain) // 16
    for at in (0, 15, 16, 40_000, 65_535, 65_536):
        other = tokens.copy()
        other[at] += 1
        changed = ids.of(other, "salt")
        same = at // 16 * 16
        assert changed[:same] == chain[:same]
        assert not known & {changed[i : i + 16] for i in range(same, len(changed), 16)}
    assert chain == ids.of(tokens[:100], "salt") + ids.further(ids.of(tokens[:100], "salt")[-16:], tokens[96:])
    for salts in ((), ("Salt",), ("salt", ""), ("", "salt")):
        assert not known & {ids.of(tokens, *salts)[:16]}
    assert PrefixIds(16).of(tokens)[:16] != ids.of(tokens)[:16]
