"""Values that FedHeNN refuses."""

from collections.abc import Mapping
from typing import Any

import pytest

import polyfed as pf
from polyfed.algorithms import FedHeNN, FedHeNNHomo


@pytest.mark.parametrize(
    ("kinds", "fields", "message"),
    [
        ("both", {"rad_batch": 1}, "rad_batch must be at least 2, or 0 for the whole RAD, got 1"),
        ("both", {"rad_size": 1}, "rad_size must be at least 2, got 1"),
        ("both", {"eta0": -0.1}, "eta0 must be at least 0, got -0.1"),
        ("both", {"eta0": float("nan")}, "eta0 must be at least 0, got nan"),
        ("both", {"sigma": 0.0}, "sigma must be positive, got 0.0"),
        ("both", {"kernel": "rfb"}, "unknown kernel 'rfb'; .*rbf"),
        ("both", {"rad": "nose"}, "unknown rad 'nose'; .*noise"),
        ("both", {"growth": "sqr"}, "unknown growth 'sqr'; .*sqrt"),
        ("both", {"pool_once": 1}, "pool_once must be true or false, got 1"),
        ("one", {"rank": 0}, "rank must be at least 1, or none, got 0"),
        ("one", {"share": "weight"}, "unknown share 'weight'; .*weights"),
        ("one", {"weighting": "size"}, "unknown weighting 'size'"),
        ("one", {"buffers": "average"}, "buffers must be 'local', .*got 'average'"),
        ("one", {"share": "weights", "rad": "noise"}, "rad='noise' needs share='representations'"),
    ],
)
def test_fields_out_of_range_are_named(kinds: str, fields: Mapping[str, Any], message: str) -> None:
    for kind in (FedHeNN, FedHeNNHomo) if kinds == "both" else (FedHeNN,):
        with pytest.raises(pf.UserError, match=f"^{kind.__name__}: {message}"):
            kind(**fields)
