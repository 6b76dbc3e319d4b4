"""The options of `P`: each file checks the values of its keywords, and says what units with them have to be."""

from . import codec, local, options, precision, table

__all__ = ["codec", "local", "options", "precision", "table"]  # each adds the parsers of its keywords, or how a spec is printed
