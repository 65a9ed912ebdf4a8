"""What one rank does with a batch: it runs a step on its layers, its KV blocks and its sampler."""
