"""Steps: accumulate, update_in_backward and pad_microbatches over micro-batches, and scan over steps."""
