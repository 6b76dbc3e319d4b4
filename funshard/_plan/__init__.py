"""A training step before it runs: what it holds, sends and takes, from shapes alone or by running it on fake tensors."""
