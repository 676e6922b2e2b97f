"""Benchmarks: this engine beside its peers, and a fleet under load."""
