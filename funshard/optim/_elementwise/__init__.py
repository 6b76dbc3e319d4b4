"""Optimizers that work element by element: torch's kernels on slices."""
