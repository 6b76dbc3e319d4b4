"""Params, sharded and whole again: shard, unshard, reshard, gather_full, reduce_grads, and what ranks agree on first."""
