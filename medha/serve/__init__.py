"""An OpenAI-compatible server over one engine, which keeps each request's objectives; ``medha serve MODEL``."""
