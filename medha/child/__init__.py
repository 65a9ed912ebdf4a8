"""Work on text in a process of its own: what may crash there, or would hold the interpreter lock for long here."""
