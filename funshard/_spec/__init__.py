"""Frozen data: the tree of a module, `P`, `Precision`, units and specs, and whether params fit them."""
