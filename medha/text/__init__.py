"""Text in and text out: encode, chat templates, incremental decoding, stop strings.

A :class:`Tokenizer` never changes once loaded and may be shared by threads; a :class:`Detokenizer` and a
:class:`StopChecker` belong to one request each.
"""

from medha.text.tokenizer import Detokenizer, StopChecker, Tokenizer, load_tokenizer

__all__ = ["Detokenizer", "StopChecker", "Tokenizer", "load_tokenizer"]
