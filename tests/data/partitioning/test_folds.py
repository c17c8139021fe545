"""Folds of a cross-validation: every example is tested once, groups stay together, classes are spread."""

import numpy as np
import pytest
import torch

import polyfed as pf
from polyfed.core.examples.examples import Examples
from polyfed.data.concat import rows_in_stored_tensors
from polyfed.data.partitioning.folds import (
    Folds,
    build_folds,
    check_seeds_suit_resplit_or_folds,
    describe_small_clients,
    split_into_folds,
    unit_names,
)
from polyfed.data.partitioning.resplit import resplit_clients
from polyfed.testing import small_clients


def rows(part):
    return rows_in_stored_tensors(part).tolist()


def test_each_example_is_tested_once_a_repeat_and_never_trains_its_tester():
    clients = small_clients(3)
    divided = split_into_folds(clients, Folds(4, repeats=2))
    assert len(divided) == 8
    for repeat in (divided[:4], divided[4:]):
        for i, client in enumerate(clients):
            total = len(client.train) + len(client.val) + len(client.test)
            tested = [row for members in repeat for row in rows(members[i].test)]
            assert sorted(tested) == sorted(set(tested))
            assert len(tested) == total
            for members in repeat:
                sets = [set(rows(part)) for part in (members[i].train, members[i].val, members[i].test)]
                assert sum(map(len, sets)) == len(set.union(*sets)) == total
                assert abs(len(members[i].val) / len(members[i].train) - len(client.val) / len(client.train)) < 0.06
    assert [rows(c.test) for c in divided[0]] != [rows(c.test) for c in divided[4]], "another repeat divides anew"
    again = split_into_folds(clients, Folds(4))
    assert [rows(c.train) for c in again[2]] == [rows(c.train) for c in divided[2]], (
        "further repeats change no earlier fold"
    )


def clients_of(labels, patients, **sets):
    x = torch.arange(float(len(labels)))[:, None]
    pool = Examples(x, torch.as_tensor(labels), columns={"patient": np.asarray(patients)}, group="patient")
    half = len(labels) // 2
    parts = [pool.select(torch.arange(a, b)) for a, b in ((0, half), (half, len(labels)))]
    return [pf.Client("a", lambda: torch.nn.Linear(1, 2), parts[0], parts[1])]


def test_classes_are_spread_within_one_example():
    labels = torch.tensor([0] * 33 + [1] * 7)
    x = torch.zeros(40, 1)
    order = torch.from_numpy(np.random.default_rng(0).permutation(40))
    client = pf.Client("a", lambda: torch.nn.Linear(1, 2), (x[:20], labels[order][:20]), (x[20:], labels[order][20:]))
    counts = [int(members[0].test.labels.sum()) for members in split_into_folds([client], Folds(5))]
    assert sorted(counts) == [1, 1, 1, 2, 2]


def test_events_and_images_with_a_mask_are_spread_within_one_example():
    happened = torch.from_numpy(np.random.default_rng(1).permutation(40) < 7)
    masks = torch.zeros(40, 4, 4, dtype=torch.int64)
    masks[happened, 0, 0] = 1
    for task, targets in {
        "survival": torch.stack([torch.arange(1.0, 41), happened.float()], dim=1),
        "segmentation": masks,
    }.items():
        x = torch.zeros(40, 1, 4, 4)
        sets = [(x[rows], targets[rows]) for rows in (slice(0, 20), slice(20, 30), slice(30, 40))]
        client = pf.Client("a", None, sets[0], sets[1], sets[2], task=task)
        members = [members[0] for members in split_into_folds([client], Folds(5))]
        assert sorted(int(client.task.strata(one.test.labels).sum()) for one in members) == [1, 1, 1, 2, 2], task
        assert {int(client.task.strata(one.val.labels).sum()) for one in members} <= {1, 2}, task


def test_the_rows_of_a_group_are_tested_together_also_at_two_clients():
    patients = [f"p{k // 3}" for k in range(30)]
    one = clients_of([k % 2 for k in range(30)], patients)[0]
    x = torch.arange(100.0, 130.0)[:, None]
    shared = Examples(
        x,
        torch.tensor([0, 1] * 15),
        columns={"patient": np.array([f"p{k // 3 + 5}" for k in range(30)])},
        group="patient",
    )
    other = pf.Client("b", one.model, *(shared.select(torch.arange(*ends)) for ends in ((0, 15), (15, 24), (24, 30))))
    divided = split_into_folds([one, other], Folds(5))
    for members in divided:
        tested, trained, validated = (
            {name for client in members if (of := getattr(client, part)) for name in of.column("patient").tolist()}
            for part in ("test", "train", "val")
        )
        assert not tested & trained
        assert not validated & (tested | trained)
    assert set(unit_names(divided[0][0].test)) == set(divided[0][0].test.column("patient").tolist())


def test_a_small_client_keeps_its_sets_unless_others_test_its_groups():
    large = clients_of([0, 1] * 15, [f"p{k // 3}" for k in range(30)])[0]

    def small_client(first):
        names = np.array([f"p{first + k // 2}" for k in range(6)])
        pool = Examples(torch.arange(200.0, 206.0)[:, None], torch.tensor([0, 1] * 3), columns={"patient": names},
                        group="patient")  # fmt: skip
        return pf.Client("b", large.model, *(pool.select(torch.arange(k, k + 2)) for k in (0, 2, 4)))

    client = small_client(first=90)
    assert describe_small_clients([large, client], 5) == {"b": "3 groups"}
    for members in split_into_folds([large, client], Folds(5)):
        assert members[1] is client
        assert describe_small_clients(members, 5) == {"b": "3 groups"}
    with pytest.raises(pf.UserError, match="client 'b' has 3 groups of column 'patient', and none for 2 of 5 folds"):
        split_into_folds([large, small_client(first=0)], Folds(5))


def test_too_few_groups_for_a_validation_set_are_said_to_be():
    pool = Examples(torch.zeros(12, 1), torch.arange(12) % 2, group=[f"p{k % 2}" for k in range(12)])
    sets = [pool.select(torch.arange(*ends)) for ends in ((0, 6), (6, 9), (9, 12))]
    client = pf.Client("a", None, *sets)
    with pytest.raises(pf.UserError, match="'a' has in a fold too few groups of column 'group' of its own"):
        split_into_folds([client], Folds(2))
    with pytest.raises(pf.UserError, match=r"no group of column 'group' for its val set .* of 2 in all; leave resplit"):
        resplit_clients([client], 2)


def test_what_is_refused():
    with pytest.raises(pf.UserError, match="client 'a' has 3 groups of column 'patient', and none for 2 of 5 folds"):
        split_into_folds(clients_of([0, 1] * 3, ["x", "x", "y", "y", "z", "z"]), Folds(5))
    for number, repeats, sentence in ((1, 1, "folds must be a whole number of at least 2, got 1"), (True, 1, "folds must"),
                                      (5, 0, "fold_repeats must be a whole number of at least 1, got 0")):  # fmt: skip
        with pytest.raises(pf.UserError, match=sentence):
            build_folds(number, repeats)
    with pytest.raises(pf.UserError, match="fold_repeats=2 repeats folds; give their number too"):
        build_folds(None, 2)
    with pytest.raises(pf.UserError, match="give one of them"):
        check_seeds_suit_resplit_or_folds(3, Folds(3), range(3))
    with pytest.raises(pf.UserError, match="needs 6 runs of each method, with a seed each; got 3 seeds"):
        check_seeds_suit_resplit_or_folds(None, Folds(3, 2), range(3))
    twice = small_clients(2)
    with pytest.raises(pf.UserError, match=r"hold the same example.*or leave folds out"):
        split_into_folds([twice[0], pf.Client("z", twice[0].model, twice[0].train, twice[1].test)], Folds(3))
