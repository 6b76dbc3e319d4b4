"""What policies refuse: where, what was expected, what came."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch import nn

import funshard as fs
from funshard.policies import always, custom, full_precision, ignoring, override, whole

MODEL = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)))
W = whole()


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: fs.by_type(), ValueError, r"by_type: expected at least one module class, got none; whole\(\) makes one unit"),
        (lambda: fs.by_type(int), TypeError, r"by_type: expected subclasses of nn\.Module, got <class 'int'>"),
        (lambda: fs.by_type(nn.Linear, nn.ReLU()), TypeError, r"by_type: expected subclasses of nn\.Module, got ReLU\(\)"),
        (lambda: whole("shard"), TypeError, r"whole: expected a P such as P\('shard'\), got 'shard'; write P\('shard'\)"),
        (lambda: whole(None), TypeError, r"whole: expected a P such as P\('shard'\), got None$"),
        (lambda: always(("a", "b")), TypeError, r"always: .* got \('a', 'b'\); write P\(\('a', 'b'\)\)"),
        (lambda: fs.by_type(nn.Linear, p="shard"), TypeError, r"by_type: expected a P such as P\('shard'\), got 'shard'"),
        (lambda: fs.by_size(1, p="shard"), TypeError, r"by_size: expected a P such as P\('shard'\), got 'shard'"),
        (lambda: custom(lambda m: True, "shard"), TypeError, r"custom: expected a P such as P\('shard'\), got 'shard'"),
        (lambda: fs.by_path({}, "shard"), TypeError, r"by_path: expected a P such as P\('shard'\), got 'shard'"),
        (lambda: fs.by_path({"m": "shard"}), TypeError, r"by_path: pattern 'm': expected a P such as .*, got 'shard'"),
        (lambda: fs.by_path({0: fs.P()}), TypeError, r"by_path: expected path patterns such as 'blocks\.\*', got 0"),
        (lambda: fs.by_path(["0"]), TypeError, r"by_path: expected a dict of path patterns and P, got list"),
        (lambda: fs.by_size(force_leaf=[int]), TypeError, r"by_size: expected subclasses of nn\.Module, got <class 'int'>"),
        (lambda: fs.by_size(exclude=["Linear"]), TypeError, r"by_size: expected subclasses of nn\.Module, got 'Linear'"),
        (lambda: full_precision(W, str), TypeError, r"full_precision: expected subclasses of nn\.Module, got <class 'str'>"),
        (lambda: ignoring(W, "0"), TypeError, r"ignoring: modules: expected an iterable, got str; put it in a list"),
        (lambda: ignoring(W, [], 3), TypeError, r"ignoring: params: expected an iterable, got int; put it in a list"),
        (lambda: ignoring(W, nn.ReLU()), TypeError, r"ignoring: modules: expected an iterable, got ReLU; put it in a list"),
        (
            lambda: ignoring(W, [int]),
            TypeError,
            r"ignoring: modules: expected path patterns, module classes or modules, got type",
        ),
        (lambda: ignoring(W, [3]), TypeError, r"ignoring: modules: expected path patterns, module classes or modules, got int"),
        (lambda: ignoring(W, [], [nn.ReLU()]), TypeError, r"ignoring: params: expected name patterns or parameters, got ReLU"),
    ],
)
def test_wrong_when_made(make: Callable[[], object], error: type[Exception], message: str) -> None:
    """Before any model is seen (test_ignored_modules_invalid: wrong types are named)."""
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("result", [None, 1, "True", [], nn.ReLU()])
def test_a4_custom_gives_a_bool_or_a_dict(result: object) -> None:
    """Anything else is refused with the path and the result, as CustomPolicy refuses it."""
    with pytest.raises(ValueError, match=r"custom: module '1\.0': expected <function .*> to give a bool or a dict, got"):
        custom(lambda m: result if m is MODEL[1][0] else False)(MODEL)


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (
            custom(lambda m: {"strategy": 1} if m is MODEL[1] else False),
            r"custom: module '1': P has no field 'strategy': expected",
        ),
        (fs.by_path({"1.*.x": fs.P()}), r"by_path: pattern '1\.\*\.x' matches no module: expected a path such as \["),
        (fs.by_path({"10": fs.P()}), r"by_path: pattern '10' matches no module: expected a path such as .*'1'"),
        (
            fs.by_path({"*.0": fs.P(), "1.*": fs.P("x")}),
            r"module '1\.0' is matched by '\*\.0' \(P\(\)\) and by '1\.\*' \(P\('x'\)\): expected",
        ),
        (ignoring(W, ["2"]), r"ignoring: modules: '2' matches no module: expected some of \['', '0', '1', '1\.0'\]"),
        (ignoring(W, [nn.Conv2d]), r"ignoring: modules: <class '.*Conv2d'> matches no module"),
        (ignoring(W, [nn.Linear(2, 2)]), r"ignoring: modules: Linear\(.*\) matches no module"),
        (ignoring(W, params=["*.scale"]), r"ignoring: params: '\*\.scale' matches no parameter of the model"),
        (ignoring(W, [""]), r"ignoring: modules: the root '' is ignored: expected something left to shard"),
        (ignoring(W, [MODEL]), r"ignoring: modules: the root '' is ignored: expected something left to shard"),
        (ignoring(fs.by_path({"1.0": fs.P()}), ["1"]), r"by_path: pattern '1\.0' matches no module"),
    ],
)
def test_wrong_for_this_model(policy: fs.Policy, message: str) -> None:
    """When the policy meets the model: every message names the path or the pattern."""
    with pytest.raises(ValueError, match=message):
        policy(MODEL)


def test_fields_of_the_wrong_type_name_the_module() -> None:
    """What custom overrides is checked as P checks it, with the path in front."""
    with pytest.raises(TypeError, match=r"custom: module '1\.0': P: reshard: expected True, False, .*, got 3"):
        custom(lambda m: {"reshard": 3} if m is MODEL[1][0] else False)(MODEL)


def test_names_that_look_like_patterns() -> None:
    """A component that is a module's very name matches it, and is more literal than one that only matches."""
    model = nn.ModuleDict({"[z]": nn.Linear(2, 2), "z": nn.Linear(2, 2), "*": nn.Linear(2, 2), "a?": nn.Linear(2, 2)})
    assert set(fs.by_path({"[z]": fs.P("a")})(model).by_path) == {"", "[z]", "z"}
    chosen = dict(fs.by_path({"[z]": fs.P("a"), "z": fs.P("b"), "*": fs.P("c")})(model).selected)
    assert {path: p.axis for path, p in chosen.items()} == {"": "c", "[z]": "a", "z": "b", "*": "c", "a?": "c"}
    assert dict(fs.by_path({"[[]z]": fs.P("a")})(model).selected).keys() == {"[z]"}
    assert set(ignoring(whole(), modules=["a?"])(model).ignored) == {"a?.weight", "a?.bias"}


def odd(module: nn.Module) -> bool:
    return len(module._parameters) % 2 == 1


def test_policies_print_as_what_made_them() -> None:
    """Classes by name, `P` where it is not the default, what is inside of combinators as well."""
    assert [repr(policy) for policy in (
        whole(), whole(fs.P()), always(p=fs.P("shard", remat=True)), fs.by_type(nn.Linear, nn.ReLU), fs.by_size(10),
        custom(odd), fs.by_path({"0": fs.P()}), override(whole(), fs.by_path({"1": fs.P("x")})),
        ignoring(whole(), ["0"], ["1.bias"]), ignoring(whole(), [MODEL[0]], [MODEL[0].bias]),
        full_precision(whole(), nn.LayerNorm),
    )] == [
        "whole()", "whole(p=P())", "always(p=P('shard', remat=True))", "by_type(Linear, ReLU)", "by_size(10)",
        "custom(odd)", "by_path({'0': P()})", "override(whole(), by_path({'1': P('x')}))",
        "ignoring(whole(), ['0'], ['1.bias'])", "ignoring(whole(), [<Linear>], [<Parameter>])",
        "full_precision(whole(), LayerNorm)",
    ]  # fmt: skip


def test_literal_patterns_beat_wildcards() -> None:
    """Where several patterns match, the one with most literal components rules; ** stands for any number of them."""
    spec = fs.by_path({"**": fs.P("a"), "*.0": fs.P("b"), "1.0": fs.P("c"), "0": fs.P("d")})(MODEL)
    assert {path: p.axis for path, p in spec.selected} == {"": "a", "0": "d", "1": "a", "1.0": "c"}


def test_two_units_with_one_key() -> None:
    """A module name that looks like the suffix of a mixed unit is an error, not a unit that hides another."""
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "a:float32": nn.Linear(2, 2)})
    model["a"].bias.data = model["a"].bias.data.double()
    with pytest.raises(ValueError, match=r"two units have the key 'a:float32': expected no ':' in module names"):
        fs.by_type(nn.Linear)(model)
