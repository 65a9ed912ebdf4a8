"""What answers the claims: one function a figure, see :mod:`medha.reproduce.registry`."""
