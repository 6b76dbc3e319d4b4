"""Params, sharded and whole again: shard, unshard, stream_full, reshard, reduce_grads, and what ranks agree on first."""
