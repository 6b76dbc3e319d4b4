"""Whole matrices of sharded parameters: their owners, and the exchange between slices and owners."""
