"""How long a batch takes: coefficients of a profile or a hardware spec, and what is predicted from them. No torch."""
