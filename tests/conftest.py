from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from typing import Any

import hypothesis
import pytest
import torch
from depth import PROFILE, choose, parse_slice, thorough
from ranks import Pool, freeze_imports

torch.set_num_threads(1)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # of ranks, too: starting its workers takes longer than their work

hypothesis.settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    max_examples=10,
    print_blob=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow, hypothesis.HealthCheck.data_too_large],
)
hypothesis.settings.register_profile("thorough", deadline=None, max_examples=300)
hypothesis.settings.load_profile(os.environ.get(PROFILE, "ci"))


LAWS = {"collectives", "compress_law", "core", "gradients", "grads", "layout", "many", "policies", "sharding", "spec", "tree"}
"""The files whose tests of one process are marked `core`."""
POOLS = {"alone", "gloo2", "gloo4", "worst2", "worst4"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--thorough", action="store_true", help="every test at full depth: hours (depth.py)")
    parser.addoption("--slice", type=parse_slice, metavar="K/N", help="part K of N of the cases that only --thorough runs")
    parser.addoption("--with-slice", type=parse_slice, metavar="K/N", help="the default cases and that part of the others")
    parser.addoption("--worst", action="store_true", help="the tests of real ranks alone, on the group of worst.py")


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--thorough"):
        os.environ[PROFILE] = "thorough"
        hypothesis.settings.load_profile("thorough")


def _pool(size: int, backend: str = "", scope: Any = "session") -> Any:
    """A fixture of so many real ranks, by default of gloo or, with --worst, of worst.py's group."""

    @pytest.fixture(scope=scope)
    def ranks(request: pytest.FixtureRequest) -> Iterator[Pool]:
        pool = Pool(size, backend or ("worst" if request.config.getoption("--worst") else "gloo"))
        yield pool
        pool.stop()

    return ranks


alone = _pool(1, "gloo")
gloo2, gloo4 = _pool(2), _pool(4)
worst2, worst4 = _pool(2, "worst", "module"), _pool(4, "worst", "module")
"""On the worst case of NCCL's streams (worst.py). Of a few modules: while idle, ranks keep waking up."""


@pytest.fixture
def not_on_worst(request: pytest.FixtureRequest) -> None:
    """For tests that worst.py's group cannot run: it takes what ranks do differently for a fault, and has no C++ backend."""
    if request.config.getoption("--worst"):
        pytest.skip("not on the group of worst.py")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
    freeze_imports()


def pytest_itemcollected(item: pytest.Item) -> None:
    if item.path.stem.removeprefix("test_") in LAWS and not POOLS & {*getattr(item, "fixturenames", ())}:
        item.add_marker("core")


@pytest.hookimpl(trylast=True)  # after -k
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--worst"):
        items[:] = [item for item in items if {"gloo2", "gloo4"} & {*getattr(item, "fixturenames", ())}]
    if thorough():
        for item in items:
            item.add_marker(pytest.mark.timeout(0))
    else:
        alone, beside = config.getoption("--slice"), config.getoption("--with-slice")
        items[:], left_out = choose(items, alone or beside, alone=alone is not None)
        config.hook.pytest_deselected(items=left_out)


def pytest_collection_finish() -> None:
    """Collect what reading the tests has left, and freeze what their imports have made."""
    gc.collect()
    freeze_imports()


@pytest.fixture
def fresh_dynamo() -> None:
    """Nothing is compiled yet, and nothing counted."""
    import torch._dynamo

    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
