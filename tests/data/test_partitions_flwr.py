"""Cross-checks against flwr-datasets, where its partitioners do what their papers say.

Not compared: its IID does not shuffle, its Dirichlet with `self_balancing` deviates from the paper and gives up after
ten draws, its pathological partition in random mode drops classes.
"""

import datasets
import numpy as np
import pytest
from flwr_datasets.partitioner import (
    DirichletPartitioner,
    IidPartitioner,
    NaturalIdPartitioner,
    PathologicalPartitioner,
    ShardPartitioner,
)

from polyfed.data.partitioning.partitions import IID, ClassesPerClient, Dirichlet, Natural, Shards

pytestmark = pytest.mark.thorough  # flwr-datasets takes seconds to import
CLASSES = 10


def theirs(partitioner, labels, users=None):
    """Rows per client of one of their partitioners."""
    table = {"row": np.arange(len(labels)), "label": labels}
    partitioner.dataset = datasets.Dataset.from_dict(table if users is None else {**table, "user": users})
    return [np.array(partitioner.load_partition(i)["row"]) for i in range(partitioner.num_partitions)]


def class_table(labels, parts):
    return np.stack([np.bincount(labels[part], minlength=CLASSES) for part in parts])


@pytest.fixture
def labels():
    return np.random.default_rng(0).permutation(np.repeat(np.arange(CLASSES), 100))


def test_iid_has_their_sizes(labels):
    flwr = theirs(IidPartitioner(num_partitions=7), labels)
    assert sorted(map(len, flwr)) == sorted(map(len, IID()(labels, 7, 0)))


@pytest.mark.filterwarnings("ignore:Specifying null_placement:FutureWarning")  # how `datasets` calls pyarrow
def test_shards_have_their_sizes_and_number_of_classes(labels):
    partitioner = ShardPartitioner(num_partitions=10, partition_by="label", num_shards_per_partition=2, shard_size=50)
    flwr, ours = theirs(partitioner, labels), Shards(k=2)(labels, 10, 0)
    assert sorted(map(len, flwr)) == sorted(map(len, ours)) == [100] * 10
    for parts in (flwr, ours):
        table = class_table(labels, parts)
        assert (table.sum(axis=0) == 100).all()
        assert set(np.unique(table)) <= {0, 50, 100}
        assert ((table > 0).sum(axis=1) <= 2).all()


def test_classes_per_client_has_the_cells_of_their_deterministic_mode(labels):
    # 10 clients × 4 classes over 10 classes: each class serves 4 clients, which the deterministic mode meets as well.
    partitioner = PathologicalPartitioner(
        num_partitions=10, partition_by="label", num_classes_per_partition=4, class_assignment_mode="deterministic"
    )
    flwr = class_table(labels, theirs(partitioner, labels))
    ours = class_table(labels, ClassesPerClient(4, equal=False)(labels, 10, 0))
    for axis in (0, 1):
        assert ((flwr > 0).sum(axis=axis) == 4).all()
        assert ((ours > 0).sum(axis=axis) == 4).all()
    assert np.array_equal(np.sort(flwr, axis=None), np.sort(ours, axis=None))


@pytest.mark.parametrize(
    "alpha", [pytest.param(0.1, marks=pytest.mark.slow), 1.0, pytest.param(10.0, marks=pytest.mark.slow)]
)
def test_dirichlet_has_their_concentration(labels, alpha):
    num_clients, draws = 5, 40
    labels = np.repeat(np.arange(CLASSES), 200)

    def concentration(parts):
        shares = class_table(labels, parts) / 200
        return (shares**2).sum(axis=0).mean()

    # `min_partition_size=0` and no balancing: their draw is the paper's then.
    flwr = np.mean(
        [
            concentration(
                theirs(
                    DirichletPartitioner(
                        num_partitions=num_clients,
                        partition_by="label",
                        alpha=alpha,
                        min_partition_size=0,
                        self_balancing=False,
                        seed=seed,
                    ),
                    labels,
                )
            )
            for seed in range(8)
        ]
    )
    ours = np.mean([concentration(Dirichlet(alpha, 1)(labels, num_clients, seed)) for seed in range(draws)])
    exact = (alpha + 1) / (num_clients * alpha + 1)  # E[Σ p²] of a symmetric Dirichlet
    assert abs(ours - exact) < 0.03
    assert abs(flwr - exact) < 0.08
    assert abs(ours - flwr) < 0.1


def test_natural_users_are_theirs(labels):
    users = np.random.default_rng(1).integers(0, 6, len(labels))
    flwr = theirs(NaturalIdPartitioner(partition_by="user"), labels, users)
    ours = Natural("user")(labels, 6, 0, {"user": users})
    assert {tuple(sorted(part)) for part in flwr} == {tuple(part) for part in ours}
