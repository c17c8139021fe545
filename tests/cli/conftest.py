"""Of the choices of each recipe and scale, one is tried in `make test`, and all in `make test-slow`."""

import pytest


@pytest.hookimpl(tryfirst=True)  # before -m decides
def pytest_collection_modifyitems(items):
    seen = set()
    for item in items:
        if getattr(item, "originalname", "") == "test_every_choice_is_a_whole_configuration":
            choice = (item.path.name, item.callspec.params["name"], item.callspec.params["scale"])
            if choice in seen:
                item.add_marker(pytest.mark.slow)
            seen.add(choice)
