"""Render all docstrings as HTML: ``python examples/guide/render.py [directory]``, by default into ``build/html``.

Needs ``pip install -e ".[docs]"``.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from pathlib import Path

import pdoc

import funshard


def named_tuples() -> set[type]:
    """Return the public named tuples of the package."""
    modules = [funshard, *(x for x in map(funshard.__dict__.get, funshard.__all__) if inspect.ismodule(x))]
    public = {getattr(module, name) for module in modules for name in module.__all__ if name != "checkpoint"}
    return {x for x in public if inspect.isclass(x) and issubclass(x, tuple)}


def render(directory: Path) -> None:
    """Write a page for every public module, with warnings as errors."""
    for cls in named_tuples():
        # Python gives a named tuple's constructor a module of its own, where pdoc does not find the types of the fields.
        cls.__new__.__module__ = cls.__module__
    for name in {*funshard.__all__} - vars(funshard).keys():  # pdoc finds no name that is imported when it is asked for
        setattr(funshard, name, getattr(funshard, name))
    pdoc.render.configure(docformat="google")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        pdoc.pdoc("funshard", output_directory=directory)


if __name__ == "__main__":
    target = Path(sys.argv[1] if sys.argv[1:] else "build/html")
    render(target)
    print(f"{target}/index.html")
