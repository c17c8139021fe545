"""For all tests and doctests: one torch thread a process, since two processes with two each slow one another down, and less
garbage collection, which costs a tenth of the time and finds little."""

import gc
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest


def _only_distributes(config: pytest.Config) -> bool:
    """Whether this is the process of xdist that runs no test itself and needs no torch."""
    return config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput")


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """Modules that are imported and tests that are collected stay to the end, and are passed over by later collections."""
    if not _only_distributes(session.config):
        import hypothesis  # noqa: F401  # it asks the collector who refers to its state, which gc.freeze() would hide
        import torch

        torch.set_num_threads(1)
    gc.disable()
    try:
        return (yield)
    finally:
        if not _only_distributes(session.config):
            gc.freeze()
        gc.set_threshold(50_000, 20, 20)
        gc.enable()


def _marks_left_out(config: pytest.Config) -> list[str]:
    return re.findall(r"not (slow|thorough)\b", config.getoption("markexpr"))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Files whose tests are all slow, or thorough, are not even imported where such tests are left out."""
    left_out = _marks_left_out(config)
    if not left_out or not collection_path.name.startswith("test_"):
        return None
    marked = rf"^pytestmark = pytest\.mark\.({'|'.join(left_out)})\b"
    return bool(re.search(marked, collection_path.read_text("utf-8"), re.M)) or None


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path: Path) -> Iterator[list[pytest.Collector]]:
    """Doctests are looked for only where there are some: to look takes a second, in each process."""
    collectors = yield
    if file_path.suffix != ".py" or b">>> " in file_path.read_bytes():
        return collectors
    return [collector for collector in collectors if type(collector) is pytest.Module]


def pytest_pycollect_makeitem(collector: pytest.Collector, name: str, obj: object) -> list[pytest.Item] | None:
    """Tests that are left out by their marks are not made first, one for each of their cases."""
    if not name.startswith(("test", "Test")) or not (left_out := _marks_left_out(collector.config)):
        return None
    return [] if any(mark.name in left_out for mark in getattr(obj, "pytestmark", ())) else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--method NAME` leaves only the tests of one method, whatever their marks, and of the lists of all
    (`tools/check_method.py`)."""
    parser.addoption("--method", metavar="NAME", help="only tests of this method, and of the lists of all methods")


@pytest.hookimpl(tryfirst=True)  # before -m decides
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Of a test of `one_case` all others are thorough. Tests of a method are those with its name, page or class among their
    parameters, and those of its own file."""
    tests_with_case = set()
    for item in items:
        if item.get_closest_marker("one_case") and not (set(item.keywords) & {"slow", "thorough"}):
            test = item.nodeid.partition("[")[0]
            if test in tests_with_case:
                item.add_marker(pytest.mark.thorough)
            tests_with_case.add(test)
    if not (name := config.getoption("method")):
        return
    chosen = [item for item in items if _concerns_method(item, name)]
    config.hook.pytest_deselected(items=[item for item in items if item not in set(chosen)])
    items[:] = chosen


def _concerns_method(item: pytest.Item, name: str) -> bool:
    if item.get_closest_marker("lists"):
        return True
    if item.path.stem == f"test_{name}":
        return not item.get_closest_marker("slow")
    values = item.callspec.params.values() if hasattr(item, "callspec") else ()
    parts = [part for value in values for part in (value if isinstance(value, tuple) else [value])]
    return name in [part.stem if isinstance(part, Path) else part for part in parts if isinstance(part, str | Path)]


def pytest_unconfigure() -> None:
    """pytest collects five times when it ends; once is enough for what tests left."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True, scope="session")
def _workers_are_asked_for() -> Iterator[None]:
    """`workers="auto"` is this process: to fork that of pytest takes longer than to train tiny clients. The tests of pools
    say how many workers they want, and the commands that tests start in processes of their own have the default."""
    from polyfed.simulation.engines import factory

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(factory, "num_usable_cores", lambda: 1)
        yield


@pytest.fixture(autouse=True, scope="session")
def _disks_do_not_wait() -> Iterator[None]:
    """A write is not forced to the disk: that saves from a power cut, which no test causes, and is most of the time that a
    tiny run directory takes. Tests that count such calls, or let them fail, put their own in place."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield
