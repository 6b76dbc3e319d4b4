"""accumulate and update_in_backward: gradients of many micro-batches, and updates while backward runs."""
