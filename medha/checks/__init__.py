"""What ``medha verify`` checks on a user's machine, from the versions up to a document of thousands of tokens.

:mod:`~medha.checks.run` has the order. :mod:`~medha.checks.machine`, :mod:`~medha.checks.kernels`,
:mod:`~medha.checks.collectives` and :mod:`~medha.checks.serving` give rows of the table (:mod:`~medha.checks.rows`).
"""
