"""Identities and closed forms hold of the examples that were trained on, so that clients are often tested on these here.
Modules beside the tests can be imported by them."""

import os
import sys
from pathlib import Path

import pytest

from polyfed.core.io.trusted_code import restore_trusted_names_afterwards, trust_code

sys.path.append(str(Path(__file__).parent))

_IGNORE = "ignore:test examples that are also training examples:UserWarning"


def pytest_collection_modifyitems(items):
    here = f"{Path(__file__).parent}{os.sep}"
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.filterwarnings(_IGNORE))


@pytest.fixture(autouse=True)
def own_networks():
    """Some methods are given networks by name: those of this library's own test suite."""
    with restore_trusted_names_afterwards():
        trust_code("polyfed.testing:SmallNet")
        yield
