"""The figures and numeric claims of the Medha papers, computed anew: ``python -m examples.reproduce``."""
