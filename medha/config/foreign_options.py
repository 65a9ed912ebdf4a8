"""Options of vLLM and SGLang that medha does not have, for Python and command line: which of them ask for nothing, why.

A value that asks for what medha does anyway is accepted and noted; every other is refused, with what to do instead.
What medha has under another name is an alias (:data:`medha.config.OPTION_ALIASES`). Standard library alone.
"""

from __future__ import annotations

from typing import Any

from medha.errors import ConfigError

_FLAG = (True, False)
_ANY = None

# By name: values that ask for nothing (None: any value does), and why. One whose values are True or False is a flag of
# the command line; the others take a value there.
FOREIGN_OPTIONS: dict[str, tuple[tuple[Any, ...] | None, str]] = {
    **dict.fromkeys(
        ("api_key", "host", "port"), ((), "there is no server; medha generate --requests FILE serves a file")
    ),
    **dict.fromkeys(("num_speculative_tokens", "speculative_config"), ((), "speculative decoding is not implemented")),
    "async_scheduling": ((False,), "decode_lag=1 prepares a batch while another runs"),
    "compilation_config": (("0",), "nothing is compiled; cuda_graphs=True captures decodes"),
    "cpu_offload_gb": ((0, "0"), "weights stay on their device; spread the model with tp or spp"),
    "cuda_graph_sizes": (_ANY, "graphs are captured for the batch sizes up to max_num_seqs"),
    "data_parallel_size": ((1, "1"), "start a job for each replica"),
    "decode_context_parallel_size": ((1, "1"), "kvp splits the KV cache of long requests, over ranks of its own"),
    "disable_custom_all_reduce": (_FLAG, "collectives are those of torch.distributed"),
    "disable_log_requests": (_FLAG, "requests are not logged"),
    "disable_log_stats": (_FLAG, "statistics are in the outputs alone"),
    "disable_radix_cache": ((True,), "there is no prefix cache"),
    "distributed_executor_backend": (("mp", "uni", "external_launcher"), "ranks are torchrun's, or the command's own"),
    "download_dir": ((), "set HF_HOME"),
    "enable_chunked_prefill": ((True,), "prompts are read in chunks; scheduler='orca' reads them whole"),
    "enable_expert_parallel": ((False,), "mixtures of experts are not implemented"),
    "enable_log_requests": ((False,), "outputs tell what became of each request"),
    "enable_lora": ((False,), "adapters are not implemented; merge them into the checkpoint"),
    "enable_prefix_caching": ((False,), "there is no prefix cache"),
    "generation_config": (("auto",), "generation_config.json gives defaults; a request's own fields go before them"),
    "guided_decoding_backend": ((), "structured outputs are not implemented"),
    "hf_token": ((), "set HF_TOKEN"),
    "kv_cache_dtype": (("auto",), "keys and values are kept in the model's dtype"),
    "limit_mm_per_prompt": ((), "models are of text alone"),
    "long_prefill_token_threshold": ((0, "0"), "long_threshold and rho_max say what long prompts yield"),
    "max_logprobs": (_ANY, "a request may ask for up to 20"),
    "max_long_partial_prefills": ((1, "1"), "long_threshold and rho_max say what long prompts yield"),
    "max_num_partial_prefills": ((1, "1"), "as many prefills share a batch as its time holds"),
    "max_seq_len_to_capture": (_ANY, "graphs hold decodes of any length"),
    "max_total_tokens": ((), "num_kv_blocks, of block_size tokens each, sizes the KV pool"),
    "num_scheduler_steps": ((1, "1"), "every step is scheduled"),
    "prefill_context_parallel_size": ((1, "1"), "kvp splits the KV cache of long requests, over ranks of its own"),
    "preemption_mode": ((), "swap_space lets requests that give way go to host memory"),
    "quantization": ((None,), "quantised weights are not implemented; load a float16 or bfloat16 checkpoint"),
    "rope_theta": ((), "hf_overrides={'rope_theta': ...} changes config.json"),
    "served_model_name": (_ANY, "there is no server that would need it"),
    "skip_tokenizer_init": ((False,), "a folder without tokenizer.json serves token ids"),
    "task": (("auto", "generate"), "models generate"),
    "tokenizer_mode": (("auto", "hf"), "tokenizer.json is what is read"),
    "tokenizer_revision": ((), "revision is that of model and tokenizer"),
    "trust_remote_code": (_FLAG, "no code of a checkpoint runs"),
}


def note_foreign(name: str, value: Any, typed: str) -> str:
    """What to tell of an option of this table that asks for nothing, which the user wrote as ``typed``; ConfigError
    where it asks for something."""
    idle, why = FOREIGN_OPTIONS[name]
    if idle is None or any(value is one or (type(value) is type(one) and value == one) for one in idle):
        return f"{typed} changes nothing: {why}"
    raise ConfigError(f"{typed} is not among medha's options: {why}")


def is_flag(name: str) -> bool:
    """Whether an option of this table stands without a value in a command line."""
    return any(isinstance(value, bool) for value in FOREIGN_OPTIONS[name][0] or ())
