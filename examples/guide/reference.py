"""Write reference.md: every public name with its signature, its docstring's first line and a link to its file.

Run ``python examples/guide/reference.py`` after a change to a public name, signature or summary line. The script parses the
package's source and imports none of it, so that the page is the same for every version of Python and torch.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

GUIDE = Path(__file__).resolve().parent
PACKAGE = GUIDE.parent.parent / "funshard"
PAGE = GUIDE / "reference.md"
COMMAND = "python examples/guide/reference.py"

GROUPS = {
    "Policies: which modules are units": "by_type by_size by_path Policy",
    "Specs: how each unit lies on the mesh": "P Precision Remat Compile Codec PartitionSpec Unit module_tree ModuleTree "
    "Param Params",
    "Sharding and full parameters": "shard unshard stream_full reshard partition combine skeleton "
    "init init_buffers random_like flatten unflatten param_views",
    "Calling the model": "functional_call trace_order SyncBatchNorm",
    "Gradients and other transforms": (
        "grad grad_and_value value_and_grad hvp per_sample_grads chunked transforms_attention remat checkpoint_name offload "
        "compile"
    ),
    "Accumulation, reductions and runs": "accumulate update_in_backward pad_microbatches scan reduce_grads weight_share",
    "Planning: a step before it runs": "plan Hardware",
    "Ranks that disagree": "check",
}
"""The names at the top of the package, in the order in which a user looks for them."""

SUBMODULES = (
    "policies",
    "optim",
    "curvature",
    "checkpoint",
    "data",
    "loss_scale",
    "averaging",
    "compress",
    "codecs",
    "collectives",
    "testing",
)
"""The public submodules, each a section. Some policies are at the top of the package."""

INTRO = f"""# Reference

Every public name: its signature, the first line of its docstring, and the file that defines it. `help(fs.shard)` shows a whole
docstring; [the README](../../README.md#the-guide) says how to render all of them as HTML. `fs` is `funshard`.

This page is made by `{COMMAND}`.
"""


class Definition(NamedTuple):
    """Where a public name is defined: the statement in its file, and the docstring."""

    file: Path
    node: ast.stmt
    doc: str


@functools.cache
def read(file: Path) -> str:
    """Return the text of a file."""
    return file.read_text(encoding="utf-8")


@functools.cache
def statements(file: Path) -> list[ast.stmt]:
    """Return the statements of a file, those for type checkers included."""
    body = ast.parse(read(file)).body
    return [x for node in body for x in (node.body if isinstance(node, ast.If) else [node])]


def exported(file: Path) -> list[str]:
    """Return the names in a file's ``__all__``."""
    for node in statements(file):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{file} has no __all__")


def module_file(base: Path) -> Path:
    """Return the file of a module, given its path without the suffix."""
    return base / "__init__.py" if base.is_dir() else base.with_suffix(".py")


def find(name: str, file: Path, *, documented: bool = True) -> Definition:
    """Return the definition of a name that a file defines or imports from within the package."""
    body, found = statements(file), None
    for node, following in zip(body, [*body[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            found = Definition(file, node, ast.get_docstring(node) or "")  # the last one: after the overloads
        elif isinstance(node, ast.Assign | ast.AnnAssign) and name in assigned(node):
            found = Definition(file, node, string(following))
        elif isinstance(node, ast.ImportFrom) and node.level:
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    base = file.parents[node.level - 1].joinpath(*(node.module or "").split("."))
                    return find(alias.name, module_file(base), documented=documented)
    if found is None:
        raise ValueError(f"{file} neither defines nor imports {name}")
    if documented and not found.doc:
        raise ValueError(f"{file}: {name} has no docstring")
    return found


def assigned(node: ast.Assign | ast.AnnAssign) -> list[str]:
    """Return the names to which a statement assigns."""
    return [ast.unparse(target) for target in (node.targets if isinstance(node, ast.Assign) else [node.target])]


def string(node: ast.stmt | None) -> str:
    """Return the text of a statement that is a string, as below a constant; else nothing."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return node.value.value
    return ""


def signature(at: Definition) -> str:
    """Return what follows the name: arguments and result, or the value of a constant."""
    if isinstance(at.node, ast.FunctionDef):
        return call(at.node, at.file)
    if isinstance(at.node, ast.ClassDef):
        return "" if is_exception(at.node) else constructor(at.node, at.file)
    text = value(at)
    return f"= {text}" if len(text) < 80 else ""


def source(node: ast.expr, file: Path) -> str:
    """Return an expression as the file writes it, on one line."""
    assert node.end_lineno
    assert node.end_col_offset
    lines = [line.encode() for line in read(file).split("\n")[node.lineno - 1 : node.end_lineno]]
    lines[-1] = lines[-1][: node.end_col_offset]
    lines[0] = lines[0][node.col_offset :]
    text = " ".join(b" ".join(lines).decode().split())
    return text.replace("( ", "(").replace(" )", ")")


def value(at: Definition) -> str:
    """Return the value of a constant, as its file writes it."""
    assert isinstance(at.node, ast.Assign | ast.AnnAssign)
    assert at.node.value
    return source(at.node.value, at.file)


def call(node: ast.FunctionDef, file: Path) -> str:
    """Return the arguments and the result of a function, without self and cls."""
    a = node.args
    positional = [*a.posonlyargs, *a.args]
    parts = [argument(x, y, file) for x, y in zip_defaults(positional, a.defaults)]
    if positional and positional[0].arg in ("self", "cls"):
        del parts[0]
    if a.vararg:
        parts.append("*" + argument(a.vararg, None, file))
    elif a.kwonlyargs:
        parts.append("*")
    parts += [argument(x, y, file) for x, y in zip(a.kwonlyargs, a.kw_defaults, strict=True)]
    if a.kwarg:
        parts.append("**" + argument(a.kwarg, None, file))
    result = f" -> {source(node.returns, file)}" if node.returns and node.name != "__init__" else ""
    return f"({', '.join(parts)}){result}"


def zip_defaults(args: list[ast.arg], defaults: list[ast.expr]) -> list[tuple[ast.arg, ast.expr | None]]:
    """Return each argument with its default, which the last ones have."""
    return list(zip(args, [*[None] * (len(args) - len(defaults)), *defaults], strict=True))


def argument(arg: ast.arg, default: ast.expr | None, file: Path) -> str:
    """Return an argument with its annotation and default; a constant of the package by its value."""
    text = arg.arg + (f": {source(arg.annotation, file)}" if arg.annotation else "")
    if isinstance(default, ast.Name):
        return f"{text} = {value(find(default.id, file, documented=False))}"
    return text + (f" = {source(default, file)}" if default else "")


def is_exception(node: ast.ClassDef) -> bool:
    """Return whether a class is an error or a warning."""
    return any(ast.unparse(base).endswith(("Error", "Warning")) for base in node.bases)


def constructor(node: ast.ClassDef, file: Path) -> str:
    """Return the arguments with which a class is made, or with which a protocol is called."""
    own = {x.name: x for x in node.body if isinstance(x, ast.FunctionDef)}
    for name in ("__init__", "__call__") if "Protocol" in map(ast.unparse, node.bases) else ("__init__",):
        if name in own:
            return call(own[name], file)
    given, keywords = [], []
    for x in node.body:
        if isinstance(x, ast.AnnAssign) and not ast.unparse(x.target).startswith("_"):
            settings = field_settings(x.value)
            if settings.get("init") == "False":
                continue
            default = settings.get("default") if settings else x.value and source(x.value, file)
            text = f"{ast.unparse(x.target)}: {source(x.annotation, file)}" + (f" = {default}" if default else "")
            (keywords if "kw_only" in settings or is_keyword_only(node) else given).append(text)
    return f"({', '.join([*given, *(['*', *keywords] if keywords else [])])})"


def field_settings(value: ast.expr | None) -> dict[str, str]:
    """Return the settings of ``dataclasses.field(...)``; nothing for any other value."""
    if isinstance(value, ast.Call) and ast.unparse(value.func).endswith("field"):
        return {k.arg: ast.unparse(k.value) for k in value.keywords if k.arg}
    return {}


def is_keyword_only(node: ast.ClassDef) -> bool:
    """Return whether a data class takes its fields by keyword alone."""
    return any("kw_only=True" in ast.unparse(x) for x in node.decorator_list)


def methods(at: Definition) -> Iterator[tuple[str, str]]:
    """Yield the public methods and properties of a class, each as it is used, and its first line."""
    for x in at.node.body if isinstance(at.node, ast.ClassDef) else []:
        if isinstance(x, ast.FunctionDef) and not x.name.startswith("_") and ast.get_docstring(x):
            if any(ast.unparse(d).endswith("property") for d in x.decorator_list):
                use = x.name + (f": {source(x.returns, at.file)}" if x.returns else "")
            else:
                use = x.name + call(x, at.file)
            yield use, summary(ast.get_docstring(x) or "")


def summary(doc: str) -> str:
    """Return the first paragraph of a docstring, on one line."""
    return " ".join(doc.split("\n\n")[0].split())


def links(text: str) -> str:
    """Return a docstring's line as Markdown: code in single backticks."""
    return re.sub(r"``(.+?)``", r"`\1`", text)


def entry(prefix: str, name: str, file: Path) -> str:
    """Return the lines of one name."""
    at = find(name, file)
    path = at.file.relative_to(PACKAGE.parent).as_posix()
    use = f"`{signature(at)}`" if signature(at) else ""
    lines = [f"- **`{prefix}{name}`**{use}", f"  <br>{links(summary(at.doc))} [source](../../{path})"]
    lines += [f"  - `.{use}`: {links(line)}" for use, line in methods(at)]
    return "\n".join(lines)


def page() -> str:
    """Return the text of reference.md."""
    top = PACKAGE / "__init__.py"
    listed = [name for names in GROUPS.values() for name in names.split()]
    if sorted([*listed, *SUBMODULES]) != sorted(exported(top)):
        odd = {*listed, *SUBMODULES} ^ {*exported(top)}
        raise ValueError(f"{Path(__file__).name}: GROUPS and funshard.__all__ differ in {sorted(odd)}")
    parts = [INTRO]
    for title, names in GROUPS.items():
        parts += [f"## {title}\n", "\n".join(entry("fs.", name, top) for name in names.split()) + "\n"]
    for module in SUBMODULES:
        file = module_file(PACKAGE / module)
        about = summary(ast.get_docstring(ast.parse(read(file))) or "")
        names = [name for name in exported(file) if module != "policies" or name not in listed]
        parts += [f"## fs.{module}\n", f"{links(about)}\n"]
        parts += ["\n".join(entry(f"fs.{module}.", name, file) for name in names) + "\n"]
    return "\n".join(parts)


def main() -> int:
    """Write the page; with ``--check`` only say whether it is as it should be."""
    text = page()
    if "--check" in sys.argv[1:]:
        return int(not PAGE.exists() or PAGE.read_text() != text)
    PAGE.write_text(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
