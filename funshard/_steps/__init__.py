"""How gradients become a step."""
