"""Measurements on the machine at hand, each a ratio taken in one run."""
