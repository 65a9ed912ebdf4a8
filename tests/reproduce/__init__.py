"""Tests of :mod:`examples.reproduce`."""

import importlib.util

HAS_MATPLOTLIB = importlib.util.find_spec("matplotlib") is not None

PLAYED = {"capacity", "decode-under-load", "schedulers", "pools", "2d-3d", "fragmentation"}
"""Figures that play traces for a minute; tests/reproduce/test_load_figures.py runs them on made-up plays."""
