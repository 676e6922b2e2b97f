"""The backends: each computes a step in its own way, behind one small interface."""
