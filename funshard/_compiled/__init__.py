"""fs.compile: a training step as one graph, and the passes over it."""
