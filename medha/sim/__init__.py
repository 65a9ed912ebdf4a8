"""Simulation of the scheduler on hardware that is not there: hardware sheets, known models, and what runs on them."""
