"""``medha profile``: measures what batches take on this machine, and fits coefficients to it."""
