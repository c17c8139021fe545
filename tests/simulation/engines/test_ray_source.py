"""A source of clients on two nodes of Ray: it is opened on each, and clients are made where they run."""

import os

import pytest

import polyfed as pf

ray = pytest.importorskip("ray")
from ray.cluster_utils import Cluster  # noqa: E402

pytestmark = pytest.mark.slow


def test_clients_are_made_on_the_nodes_where_they_run(tmp_path, monkeypatch):
    """Of 100,000 clients; each node makes those that it trains, and this process hardly any."""
    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")

    class NotedSource:
        """Notes which node and process makes a client."""

        def __init__(self, folder, parent):
            from polyfed.data import SyntheticClients

            self.inner, self.folder, self.parent = SyntheticClients(100_000, examples=(8, 12)), folder, parent

        @property
        def ids(self):
            return self.inner.ids

        def manifest(self):
            return self.inner.manifest()

        def client(self, id):
            import ray

            where = "parent" if os.getpid() == self.parent else ray.get_runtime_context().get_node_id()
            with open(f"{self.folder}/{where}", "a", encoding="utf-8") as file:
                file.write(f"{id}\n")
            return self.inner.client(id)

    folder = tmp_path / "made"
    folder.mkdir()
    words = {"rounds": 2, "clients_per_round": 100, "evaluate_clients": 10, "evaluate_every": 2, "quiet": True}
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        cluster.add_node(num_cpus=1)
        cluster.wait_for_nodes()
        source = NotedSource(str(folder), os.getpid())
        run = pf.federate(source, "fedavg", engine="ray", workers=2, ray_address=cluster.address, **words)
    finally:
        ray.shutdown()
        cluster.shutdown()
    made = {file.name: file.read_text().split() for file in folder.iterdir()}
    nodes = [clients for where, clients in made.items() if where != "parent"]
    assert len(nodes) == 2
    assert all(nodes)
    assert len(made.get("parent", [])) <= 3  # the first client, which is checked before round 1
    trained = {client for record in run.history for client, row in record["clients"].items() if "bytes_up" in row}
    assert trained <= {client for clients in nodes for client in clients}
    alone = pf.federate(source.inner, "fedavg", workers=0, **words)
    assert run.history[-1]["summary"] == alone.history[-1]["summary"]
