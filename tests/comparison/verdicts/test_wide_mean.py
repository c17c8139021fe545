"""A mean whose interval one client of few examples makes wide: the sentence names this client, not all examples."""

import numpy as np

from tests.comparison.verdicts.test_verdict_sentences import made, three_sites


def sites_with_a_tiny_one():
    """Three sites of 400 examples, and one of three, of which each network has others right."""
    right = three_sites()
    for method, hits in (("local", (0, 3, 1)), ("fed", (3, 0, 2))):
        right[method]["tiny"] = [np.arange(3) < number for number in hits]
    return right


def test_the_client_that_widens_the_interval_of_the_mean_is_named():
    for changes in ({}, {"same_clients": False}):  # with the clients' intervals, and with spreads over seeds
        sentence = made(sites_with_a_tiny_one(), **changes)["mean_answer"]["sentence"]
        splits = "3 splits of " if changes else ""
        assert f"not decided: {splits}3 test examples at tiny cannot answer: the interval is" in sentence
        assert sentence.endswith("points wide, mostly because of this client")


def test_no_client_is_named_where_all_are_small():
    assert "12 test examples cannot answer" in made(three_sites(4))["mean_answer"]["sentence"]
