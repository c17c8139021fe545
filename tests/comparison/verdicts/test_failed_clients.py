"""A client that fails in rounds of a compared run is named where the answers are."""

import polyfed as pf
from polyfed.testing import small_clients


def test_scores_without_the_training_of_a_client_are_said_to_be_so():
    def fail(outputs, labels):
        raise ValueError("no power")

    first, second, third = small_clients()
    clients = [pf.Client(first.id, first.model, first.train, first.test, loss=fail), second, third]
    words = {"tune": "none", "references": False, "quiet": True, "parallel": 1, "on_error": "skip"}
    comparison = pf.compare(clients, ["fedprox"], rounds=2, seeds=[0, 1], **words)
    (sentence,) = (text for text in comparison.results["warnings"] if "client-0" in text)
    assert sentence.startswith(
        "In 4 of 4 rounds of local, fedavg, fedavg_ft and fedprox, client 'client-0' failed, and"
    )
    assert "no power" in sentence
    assert str(comparison).startswith("In 4 of 4 rounds of local")
