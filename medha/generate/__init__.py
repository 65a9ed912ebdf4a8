"""``python -m medha.generate``: prompts or request files in, answers out."""
