"""The tree of a state: its leaves, how a spec cuts them into named ranges, and its structure as JSON."""
