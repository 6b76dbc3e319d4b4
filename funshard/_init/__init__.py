"""init, init_buffers: a model on the meta device gets its values, a unit at a time and alike on every rank."""
