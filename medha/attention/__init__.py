"""Exact attention over a paged KV cache, in parts that merge.

:mod:`~medha.attention.interface` states the one interface: partial attention of a ragged batch, output and
log-sum-exp. :mod:`~medha.attention.merge` joins parts of a KV range. :mod:`~medha.attention.torch_backend` is the
backend that needs torch alone, on CPU and CUDA.
"""
