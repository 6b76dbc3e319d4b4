"""The ranks that write or read a checkpoint together: what they exchange, and how they report errors and lost ranks."""
