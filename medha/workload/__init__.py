"""Workloads: traces of request arrivals and lengths, read, written, generated and summarised, without torch."""
