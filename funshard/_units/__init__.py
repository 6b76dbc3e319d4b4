"""One unit: the layout of its buffer, buckets of small tensors, and weights of micro-batches."""
