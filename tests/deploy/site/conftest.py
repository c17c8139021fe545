"""Sites for the tests of this folder."""

from functools import partial

import pytest

from ..private_sites import make_site


@pytest.fixture
def site(tmp_path):
    """Makes a site that trains with privacy, or the same site again."""
    return partial(make_site, tmp_path)
