"""Simulation of the scheduler on hardware that is not there: hardware specs, known models, and what runs on them."""
