"""Scheduling: pure Python, no torch, handed the time; the same objects drive the engine and a simulator."""
