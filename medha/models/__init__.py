"""Decoder-only models: layers, RoPE, weights, and the constructed needle model."""
