"""Functions of functions: grad, hvp, remat, per_sample_grads; and what it takes to run a function again."""
