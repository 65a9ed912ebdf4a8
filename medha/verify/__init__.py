"""What ``medha verify`` checks on a user's machine, from the versions up to a document of thousands of tokens.

:mod:`~medha.verify.run` has the order. :mod:`~medha.verify.kernels` and :mod:`~medha.verify.serving` give rows of the
table (:mod:`~medha.verify.rows`).
"""
