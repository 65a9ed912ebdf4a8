"""The smallest model that the benchmarks can run."""

import json

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}

ON_TINY = ["--hf-overrides", json.dumps(TINY), "--num-threads", "1"]
"""Flags that run it, on one thread."""
