"""Workloads: traces of request arrivals and lengths, read, written, generated and summarised, without torch.

:mod:`~medha.workload.trace` has the columns, :mod:`~medha.workload.io` and :mod:`~medha.workload.io` the
files, :mod:`~medha.workload.formats` what each format means. :mod:`~medha.workload.synth` generates.
"""
