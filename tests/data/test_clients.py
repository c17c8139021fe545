"""Clients are views of one store; shifts, augmentation, common test set and public pool reach the right examples."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from polyfed.core.algorithm import Client
from polyfed.core.errors import UserError
from polyfed.data import (
    Examples,
    PadCropFlip,
    PooledDataset,
    Shift,
    Split,
    class_counts,
    draw_class_counts,
    make_clients,
)
from polyfed.data.partitioning.partitions import IID, ClassesPerClient
from polyfed.data.sources.published.vision import Digits
from polyfed.simulation.checks.fingerprints import data_fingerprint


@pytest.fixture(scope="module")
def pool() -> PooledDataset:
    return Digits(common_test=0.2).load()


def test_clients_share_one_store_and_have_disjoint_rows(pool):
    clients, public = make_clients(
        pool, Split(8, val_fraction=0.1, global_test=50, public_fraction=0.1), ClassesPerClient(4), seed=0
    )
    store = pool.train.x.data_ptr()
    assert [client.id for client in clients] == [f"client-00{i}" for i in range(8)]
    rows = []
    for client in clients:
        for part in (client.train, client.val, client.test):
            assert part.x.data_ptr() == store
            rows += part.index.tolist()
        assert len(set(client.test.labels.tolist())) == 4
        assert client.global_test is clients[0].global_test
    assert public.x.data_ptr() == store
    assert len(public) == round(0.1 * len(pool.train))
    rows += public.index.tolist()
    assert len(set(rows)) == len(rows)
    common = clients[0].global_test
    assert common.x.data_ptr() == pool.test.x.data_ptr()
    assert np.bincount(common.labels).tolist() == [5] * 10


def test_shifts_go_round_and_cover_everything_a_client_sees(pool):
    shifts = (Shift(), Shift(rotation=90), Shift(rotation=30))
    config = Split(4, val_fraction=0.1, global_test=-1)
    plain, _ = make_clients(pool, config, IID(), 0)
    shifted, _ = make_clients(pool, config, IID(), 0, shifts)
    assert shifted[0].train.x.data_ptr() == pool.train.x.data_ptr() == shifted[3].train.x.data_ptr()
    assert shifted[0].global_test is pool.test
    for name in ("train", "val", "test", "global_test"):
        before, after = getattr(plain[1], name), getattr(shifted[1], name)
        rows = torch.arange(len(before))
        x, y = before.batch(rows)
        turned, labels = after.batch(rows)
        assert torch.equal(torch.rot90(x, 1, (2, 3)), turned)
        assert torch.equal(y, labels)
        assert len(after.x) == len(after)


def test_only_training_batches_are_augmented(pool):
    clients, _ = make_clients(pool, Split(2), IID(), 0, augment=PadCropFlip(2, flip=False))
    assert clients[0].test.augment is None
    rows, generator = torch.arange(20), torch.Generator().manual_seed(0)
    assert not torch.equal(clients[0].train.batch(rows, generator)[0], clients[0].train.batch(rows)[0])
    assert torch.equal(clients[0].test.batch(rows, generator)[0], clients[0].test.batch(rows)[0])


def test_a_missing_or_too_small_common_test_set_is_said(pool):
    with pytest.raises(UserError, match="needs a common test set, which this data set does not have"):
        make_clients(replace(pool, test=None), Split(2, global_test=5), IID(), 0)
    with pytest.raises(UserError, match="global_test=5000 is more than the 359 examples"):
        make_clients(pool, Split(2, global_test=5000), IID(), 0)


def test_pool_checks_labels_and_columns():
    x = torch.zeros(3, 2)
    with pytest.raises(UserError, match="labels run from 0 to 2; with 2 classes they must run from 0 to 1"):
        PooledDataset(Examples(x, torch.tensor([0, 1, 2])), None, ("a", "b"))
    with pytest.raises(UserError, match="no training examples"):
        PooledDataset(Examples(x[:0], torch.zeros(0, dtype=torch.int64)), None, ("a",))
    with pytest.raises(UserError, match="column 'user' has 2 values for 3"):
        PooledDataset(Examples(x, torch.tensor([0, 1, 0])), None, ("a", "b"), columns={"user": np.zeros(2)})
    with pytest.raises(UserError, match="must be one whole number per example"):
        PooledDataset(Examples(x, torch.zeros(3)), None, ("a",))
    with pytest.raises(UserError, match="must be 0 or 1"):
        PooledDataset(Examples(x, torch.full((3, 2), 0.5)), None, ("a", "b"), "multilabel")
    with pytest.raises(UserError, match=r"2 labels need \(num, 2\)"):
        PooledDataset(Examples(x, torch.zeros(3, 3)), None, ("a", "b"), "multilabel")


def test_pool_fingerprint_follows_the_content(pool):
    other = replace(pool, train=replace(pool.train, y=pool.train.y.flip(0)))
    assert pool.fingerprint == Digits(common_test=0.2).load().fingerprint != other.fingerprint


@pytest.mark.thorough
@pytest.mark.parametrize("suffix", [pytest.param(".png", marks=pytest.mark.slow), ".svg"])
def test_class_table_is_drawn_and_repeatable(pool, tmp_path, suffix):
    clients, _ = make_clients(pool, Split(12), ClassesPerClient(3), 0)
    counts = class_counts(pool.train.labels.numpy(), [client.rows for client in clients], 10)
    file = tmp_path / f"table{suffix}"
    draw_class_counts(counts, pool.class_names, file)
    content = file.read_bytes()
    assert content[:5] in (b"\x89PNG\r", b"<?xml")
    draw_class_counts(counts, pool.class_names, file)
    assert file.read_bytes() == content
    draw_class_counts(np.ones((500, 100), int), list(map(str, range(100))), tmp_path / "large.png")


def test_class_table_refuses_what_does_not_fit(tmp_path):
    with pytest.raises(UserError, match=r"must end in .png or .svg, got '.*table.gif'"):
        draw_class_counts(np.ones((2, 2)), "ab", tmp_path / "table.gif")
    with pytest.raises(UserError, match=r"\(2, 2\) do not fit 3 classes"):
        draw_class_counts(np.ones((2, 2)), "abc", tmp_path / "table.png")
    with pytest.raises(UserError, match="cannot write the picture"):
        draw_class_counts(np.ones((2, 2)), "ab", tmp_path / "missing" / "table.png")


@pytest.mark.slow
def test_import_is_light():
    heavy = "datasets kornia sklearn pyarrow PIL matplotlib pandas"
    code = f"import sys, polyfed.data; sys.exit(' '.join(set('{heavy}'.split()) & set(sys.modules)) or None)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_clients_have_the_columns_of_the_pool():
    """Each client the values of its own rows, a client whose images are turned too; the fingerprint is of examples alone."""
    digits = Digits().load()
    names = np.array([f"user-{n % 7}" for n in range(len(digits.train))])
    pool = replace(digits, columns={"user": names, "row": np.arange(len(names))})
    config = Split(3, val_fraction=0.2, public_fraction=0.1)
    for shifts in ((), (Shift(rotation=90), Shift())):
        clients, _ = make_clients(pool, config, IID(), 0, shifts)
        for client in clients:
            for part in ("train", "test", "val"):
                rows = getattr(client.rows, part)
                assert getattr(client, part).column("row").tolist() == rows.tolist()
                assert getattr(client, part).column("user").tolist() == names[rows].tolist()
    clients, _ = make_clients(pool, config, IID(), 0)
    assert clients[0].train.columns["user"] is names  # shared, as the images are
    others, _ = make_clients(digits, config, IID(), 0)
    with pytest.raises(UserError, match="the examples have no column 'user'"):
        others[0].test.column("user")
    made = [[Client(c.id, None, c.train, c.test, c.val) for c in found] for found in (clients, others)]
    assert data_fingerprint(made[0]) == data_fingerprint(made[1])
