"""Optimizer state at rest in a codec of blocks, such as 8 bits."""
