"""What training with privacy costs each example or patient, and the book in which a site counts it."""

import json
import math

import pytest

from polyfed.core.errors import UserError
from polyfed.core.training.privacy.randomness import PrivateSteps
from polyfed.core.training.privacy.sampled_gaussian import epsilon_of_steps
from polyfed.deploy.privacy import ledger as ledgers
from polyfed.deploy.privacy.accountant import (
    check_budget_for_next_message,
    read_spent_epsilon,
    record_message_and_get_epsilon,
)
from polyfed.deploy.privacy.gaussian_mechanism import ReplyProtection
from polyfed.deploy.privacy.ledger import StepKind, read_ledger
from polyfed.deploy.privacy.secret_randomness import SecretRandomness
from polyfed.deploy.privacy.unit_accountant import (
    check_budget_for_steps,
    compute_unit_epsilon,
    mark_private_run,
    read_spent_unit_epsilon,
    record_private_steps,
)

LIMITED = ReplyProtection(max_epsilon=4.0)
NOISY = ReplyProtection(clip_norm=1.0, noise_multiplier=8.0)
KIND = StepKind("example", 0.1, 1.5)
STEPS = PrivateSteps("example", 0.1, 1.5, 40)


def test_steps_cost_what_the_simulation_says():
    assert compute_unit_epsilon({}, {KIND: 40}, "example", 1e-5) == epsilon_of_steps(0.1, 1.5, 40, 1e-5)
    assert compute_unit_epsilon({}, {}, "example", 1e-5) == 0.0


@pytest.mark.parametrize("rate", [1.0, 0.1, 1e-9])
@pytest.mark.parametrize("multiplier", [5e-324, 1e-200, 1e-12, 1e-5, 1e-3])
def test_noise_that_is_next_to_nothing_protects_nothing(tmp_path, rate, multiplier):
    """Its square is 0 for a computer, which is not a reason for an epsilon of 0."""
    assert compute_unit_epsilon({}, {StepKind("example", rate, multiplier): 1}, "example", 1e-5) > 4
    with pytest.raises(UserError, match="above max-epsilon"):
        record_private_steps(tmp_path / "privacy.json", "data", LIMITED, PrivateSteps("example", rate, multiplier, 1))
    huge = StepKind("example", rate, 1.0)
    assert compute_unit_epsilon({}, {huge: 10**12, StepKind("example", rate, 1e-200): 1}, "example", 1e-5) == math.inf


def test_all_that_left_adds_up_and_what_had_no_noise_is_infinite():
    steps, other = {KIND: 40}, {StepKind("example", 0.3, 2.0): 10}
    alone = compute_unit_epsilon({}, steps, "example", 1e-5)
    assert compute_unit_epsilon({}, {**steps, **other}, "example", 1e-5) > alone
    assert compute_unit_epsilon({8.0: 3}, steps, "example", 1e-5) > alone, "the site's own noise is not free"
    assert compute_unit_epsilon({8.0: 3}, {}, "example", 1e-5) == pytest.approx(epsilon_of_steps(1.0, 4.0, 3, 1e-5))
    assert compute_unit_epsilon({0.0: 1}, steps, "example", 1e-5) == math.inf
    assert compute_unit_epsilon({}, steps, "group", 1e-5) == math.inf


def test_the_book_is_closed_when_the_budget_is_spent(tmp_path):
    book = tmp_path / "privacy.json"
    spent = [record_private_steps(book, "data", LIMITED, STEPS) for _ in range(2)]
    assert spent == [epsilon_of_steps(0.1, 1.5, 40 * n, 1e-5) for n in (1, 2)]
    with pytest.raises(
        UserError, match=r"epsilon of each example would be .* above max-epsilon = 4 of the data set 'data'"
    ):
        record_private_steps(book, "data", LIMITED, STEPS)
    before = book.read_bytes()
    with pytest.raises(UserError, match=r"with 40 more steps of noise 1\.5"):
        check_budget_for_steps(book, "data", LIMITED, STEPS)
    assert book.read_bytes() == before
    assert read_spent_unit_epsilon(book, "data", "example", 1e-5) == spent[-1] <= 4.0
    assert record_private_steps(book, "other people", LIMITED, STEPS) == spent[0]


def test_both_books_know_one_another(tmp_path):
    book = tmp_path / "privacy.json"
    record_message_and_get_epsilon(book, "data", NOISY)
    record_private_steps(book, "data", LIMITED, STEPS)
    assert json.loads(book.read_text()) == {
        "version": 1, "data_sets": {"data": {"8.0": 1}}, "private_steps": {"data": {"example 0.1 1.5": 40}},
    }  # fmt: skip
    assert read_spent_unit_epsilon(book, "data", "example", 1e-5) > epsilon_of_steps(0.1, 1.5, 40, 1e-5)
    assert read_spent_epsilon(book, "data", NOISY) == math.inf, "noise on gradients does not hide the whole data set"
    strict = ReplyProtection(clip_norm=1.0, noise_multiplier=8.0, max_epsilon=100.0)
    with pytest.raises(UserError, match=r"runs with privacy have left without noise that hides the whole data set"):
        check_budget_for_next_message(book, "data", strict)
    mark_private_run(book, "other")
    with pytest.raises(UserError, match="runs with privacy"):
        check_budget_for_next_message(book, "other", strict)


def test_what_left_without_noise_or_for_other_units_leaves_no_budget(tmp_path):
    book = tmp_path / "privacy.json"
    record_message_and_get_epsilon(book, "data", ReplyProtection())
    with pytest.raises(UserError, match=r"would be inf \(1 messages have left without noise or privacy\)"):
        record_private_steps(book, "data", LIMITED, STEPS)
    record_private_steps(book, "rows", LIMITED, STEPS)
    with pytest.raises(UserError, match=r"each group would be inf \(earlier runs protected each example instead\)"):
        record_private_steps(book, "rows", LIMITED, PrivateSteps("group", 0.1, 1.5, 1))


@pytest.mark.parametrize(
    "entry",
    ['"example 0.1 1.5": 0', '"patient 0.1 1.5": 3', '"example 0 1.5": 3', '"example 0.1 0": 3', '"example 0.1": 3',
     '"example nan 1.5": 3', '"example 0.1 inf": 3', '"example 0.1 1.5 2": 3', '"example 0.1 1.5": 1.5'],
)  # fmt: skip
def test_a_damaged_book_is_no_new_budget(tmp_path, entry):
    book = tmp_path / "privacy.json"
    book.write_text(f'{{"version": 1, "data_sets": {{}}, "private_steps": {{"data": {{{entry}}}}}}}')
    with pytest.raises(UserError, match=r"is damaged .*put back a copy of it"):
        record_private_steps(book, "data", LIMITED, STEPS)


def test_an_older_copy_of_the_book_is_no_new_budget(tmp_path):
    book = tmp_path / "privacy.json"
    record_private_steps(book, "data", LIMITED, STEPS)
    older = book.read_bytes()
    record_private_steps(book, "data", LIMITED, STEPS)
    book.write_bytes(older)
    with pytest.raises(UserError, match=r"has 40 messages and private steps .* and 80 were sent: it is an older copy"):
        record_private_steps(book, "data", LIMITED, STEPS)


def test_a_site_that_dies_between_book_and_count_goes_on(tmp_path, monkeypatch):
    book, write = tmp_path / "privacy.json", ledgers.write_file_atomically

    def dies(path, content):
        if path.name == "privacy-count.json":
            raise OSError("killed")
        write(path, content)

    monkeypatch.setattr(ledgers, "write_file_atomically", dies)
    with pytest.raises(OSError, match="killed"):
        record_private_steps(book, "data", LIMITED, STEPS)
    monkeypatch.undo()
    record_private_steps(book, "data", LIMITED, STEPS)
    assert read_ledger(book).private_steps == {"data": {KIND: 80}}


def test_secret_numbers_are_uniform_and_normal_and_never_the_same():
    import torch

    first, second = SecretRandomness(), SecretRandomness()
    zeros = torch.zeros(20_000)
    noise = first.add_noise(zeros, 3.0)
    assert noise.dtype == zeros.dtype
    assert float(noise.std()) == pytest.approx(3.0, rel=0.03)
    assert float(noise.mean()) == pytest.approx(0.0, abs=0.1)
    assert not torch.equal(noise, second.add_noise(zeros, 3.0))
    assert not torch.equal(noise, first.add_noise(zeros, 3.0))
    drawn = first.draw_sample(20_000, 0.2)
    assert drawn.dtype == torch.int64
    assert len(drawn) == pytest.approx(4000, rel=0.06)
    assert len(first.draw_sample(50, 1.0)) == 50
    assert not torch.equal(drawn, first.draw_sample(20_000, 0.2))
