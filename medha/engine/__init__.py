"""Rank 0: the loop that serves requests, and what surrounds it."""
