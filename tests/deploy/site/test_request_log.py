"""How often a site begins a task that fails: without masks and noise, where the server has the reply anyway, ten times."""

import json

from polyfed.algorithms import Local
from polyfed.core.algorithm import Message
from polyfed.deploy.protocol.wire import PROTOCOL, Envelope
from polyfed.deploy.site.request_log import FAILURE_TEXT, MAX_REFUSALS
from polyfed.deploy.site.site import Site
from polyfed.simulation.settings import Settings
from polyfed.simulation.storage.configuration import describe_method_and_settings
from polyfed.testing import small_clients

from .test_disclosure_guard import failing

METHOD = describe_method_and_settings(Local(lr=0.05), Settings(rounds=1))["algorithm"]


def test_failures_of_a_round_are_counted_and_bounded_without_secure_sums_too(tmp_path, caplog):
    (client,) = small_clients(1)
    calls = []
    site = Site(client.id, lambda: (calls.append(1), failing(client))[1], tmp_path)

    def ask(number):
        head = {"kind": "task", "protocol": PROTOCOL, "run": "a", "algorithm": METHOD, "phase": "local", "round": number,
                "client": client.id, "seed": 1, "run_seed": 1, "state": None, "keep": 0, "metrics": []}  # fmt: skip
        return site.answer_envelope(Envelope(head, Message({}, {"lr": 0.05}))).head

    for _ in range(MAX_REFUSALS):
        assert ask(1)["failure"] == "RuntimeError (its text is in the log of the site)"
    assert f"{MAX_REFUSALS} times of at most {MAX_REFUSALS}" in caplog.text
    assert [ask(1)["refused"], ask(1)["refused"]] == [FAILURE_TEXT, FAILURE_TEXT]
    assert len(calls) == MAX_REFUSALS
    assert ask(2)["failure"], "another round is another task"
    entries = json.loads((tmp_path / "a" / "requests.json").read_text())
    assert {name: entry["refusals"] for name, entry in entries.items()} == {"local 1": MAX_REFUSALS, "local 2": 1}
