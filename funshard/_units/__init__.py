"""Weights of micro-batches, and how the calls of an accumulation reduce."""
