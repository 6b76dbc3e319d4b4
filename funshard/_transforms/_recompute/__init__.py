"""Recomputation: a function runs again for its derivatives, with the objects it found in its first run."""
