"""One unit: the layout of its buffer, and its gathers and reductions between ranks."""
