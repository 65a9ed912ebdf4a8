"""What answers the claims: one function a figure, see :mod:`examples.reproduce.report`."""
