"""Gradient transformations and wrappers of optimizers: pairs of pure functions that compose, as in Optax."""
