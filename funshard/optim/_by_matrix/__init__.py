"""Optimizers that need whole matrices: the rank that owns a matrix computes its step."""
