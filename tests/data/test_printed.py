"""What Python prints of data: their form and number, and nothing of a row."""

import pytest
import torch

import polyfed as pf
from polyfed.cli.main import main


def test_what_is_printed_of_a_table_holds_no_row():
    rows = {
        "age": [61.4375 + i for i in range(20)],
        "ward": ["icu", "er"] * 10,
        "ill": [0, 1] * 10,
        "site": list("ab") * 10,
    }
    sites = pf.data.split_table(rows, "ill", "site")
    clients = sites.build_clients(lambda: torch.nn.Linear(3, 2))
    assert str(sites) == "ClientTables(a: 7 rows to train and 3 to test, b: 7 rows to train and 3 to test)"
    assert repr(clients[0]) == "Client('a', 7 train, 3 test, classification)"
    for shown in (sites, sites.client_data[0], sites.dataset, clients, clients[0].train):
        assert "61.4375" not in repr(shown)
        assert "array(" not in repr(getattr(shown, "train", shown))
        assert "tensor(" not in repr(shown)


def test_the_name_of_a_network_is_answered_with_what_to_write():
    sites = pf.data.split_table({"age": [*range(20)], "ill": [0, 1] * 10, "site": [*"aabb"] * 5}, "ill", "site")
    for given in ("mlp", {"a": "mlp", "b": torch.nn.Identity}):
        with pytest.raises(pf.UserError, match=r"the name 'mlp'; write pf\.models\.ModelSpec\('mlp', {}, \(1,\), 2\)$"):
            sites.build_clients(given)
    run = pf.federate(sites.build_clients(pf.models.ModelSpec("mlp", {}, (1,), 2)), "fedavg", rounds=1, workers=0)
    assert run.last.round == 1


def test_sites_named_by_numbers_are_listed_as_numbers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    lines = [f"{i / 7},{i % 2},{1 + i // 8}" for i in range(96)]
    (tmp_path / "t.csv").write_text("\n".join(["age,ill,site", *lines]))
    assert main(["data", "--data", "table", "--data.path", "t.csv", "--data.target", "ill", "--data.site", "site"]) == 0
    shown = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    assert shown == [str(number) for number in range(1, 13)]
    clients = pf.data.split_table("t.csv", "ill", "site").build_clients(lambda: torch.nn.Linear(1, 2))
    run = pf.federate(clients, "local", rounds=1, workers=0)
    assert [row["client"] for row in run.table()] == [*map(str, range(1, 13)), "mean"]
