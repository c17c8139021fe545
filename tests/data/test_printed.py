"""What Python prints of data: their form and number, and nothing of a row."""

import torch

import polyfed as pf


def test_what_is_printed_of_a_table_holds_no_row():
    rows = {
        "age": [61.4375 + i for i in range(20)],
        "ward": ["icu", "er"] * 10,
        "ill": [0, 1] * 10,
        "site": list("ab") * 10,
    }
    sites = pf.data.table(rows, "ill", "site")
    clients = sites.clients(lambda: torch.nn.Linear(3, 2))
    assert str(sites) == "Sites(a: 7 rows to train and 3 to test, b: 7 rows to train and 3 to test)"
    assert "7 of inputs torch.float32 of shape (2,), labels torch.int64 of shape ()" in repr(clients[0])
    for shown in (sites, sites.parts[0], sites.pool, clients, clients[0].train):
        assert "61.4375" not in repr(shown)
        assert "array(" not in repr(getattr(shown, "train", shown))
        assert "tensor(" not in repr(shown)
