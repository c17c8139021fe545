"""The running mean kernel of FedHeNN in a matrix of fixed size: exact where it can be, and never wronger than it says."""

import torch

from polyfed.alignment.kernel_sketch import KernelSketch


def random_representations(number, seed=0, rows=20, width=4):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(rows, width, generator=generator) + 3 for _ in range(number)]


def centred_kernel(a):
    centred = a.double() - a.double().mean(0)
    return centred @ centred.T


def mean_kernel(representations, weights):
    return sum(w * centred_kernel(a) for w, a in zip(weights, representations, strict=True)) / sum(weights)


def kernel_of(sketch):
    return sketch.features.double() @ sketch.features.double().T


def test_with_all_clients_in_each_round_and_full_rank_it_is_the_mean_kernel():
    sketch = KernelSketch.empty(20, 19)
    for round_number, weights in enumerate([[1.0, 1.0, 1.0], [3.0, 1.0, 8.0]]):
        replies = random_representations(3, round_number)
        sketch = sketch.add_replies(replies, weights, num_clients=3)
        torch.testing.assert_close(kernel_of(sketch), mean_kernel(replies, weights), rtol=1e-4, atol=1e-4)
        assert sketch.relative_error < 1e-6


def test_earlier_rounds_weigh_as_their_clients_are_likely_to_be_undrawn():
    """Rounds of 2 of 5 clients: K̄ = Σ_t (3/5)^(T−t) Σ_j K_j(t), divided by its weights."""
    sketch, rounds = KernelSketch.empty(20, 19), [random_representations(2, seed) for seed in range(4)]
    for replies in rounds:
        sketch = sketch.add_replies(replies, [1.0, 1.0], num_clients=5)
    everything = [a for replies in rounds for a in replies]
    weights = [0.6 ** (3 - t) for t in range(4) for _ in range(2)]
    torch.testing.assert_close(kernel_of(sketch), mean_kernel(everything, weights), rtol=1e-4, atol=1e-4)


def test_its_expectation_is_the_exact_mean_of_the_latest_networks():
    """With cohorts drawn uniformly: the mean weight of a reply by its age, over many draws, in exact K̄ and in the sketch."""
    generator = torch.Generator().manual_seed(0)
    clients, cohort, rounds, draws = 6, 2, 5, 4000
    counts = torch.zeros(rounds)
    for _ in range(draws):
        latest = torch.full((clients,), -1)
        for t in range(rounds):
            latest[torch.randperm(clients, generator=generator)[:cohort]] = t
        counts += torch.bincount(latest[latest >= 0], minlength=rounds)
    expected = torch.tensor([cohort * (1 - cohort / clients) ** (rounds - 1 - t) for t in range(rounds)])
    torch.testing.assert_close(counts / draws, expected, rtol=0.05, atol=0.0)


def test_what_is_lost_is_the_trace_of_the_error_which_bounds_it():
    small, exact = KernelSketch.empty(20, 5), KernelSketch.empty(20, 19)
    for seed in range(6):
        replies = random_representations(3, seed)
        small, exact = (s.add_replies(replies, [1.0] * 3, num_clients=9) for s in (small, exact))
    error = kernel_of(exact) - kernel_of(small)
    assert small.lost > 0
    assert abs(float(error.trace()) - small.lost) < 1e-3 * small.lost
    values = torch.linalg.eigvalsh(error)
    assert float(values.min()) > -1e-3  # K̄ − FFᵀ is positive semidefinite
    assert float(values.max()) <= small.lost
    assert small.relative_error == small.lost / (small.lost + float(small.features.double().square().sum()))
    assert tuple(small.features.shape) == (20, 5)


def test_its_size_does_not_depend_on_the_clients():
    sketch = KernelSketch.empty(20, 5).add_replies(random_representations(1, width=2), [1.0], num_clients=1_000)
    assert tuple(sketch.features.shape) == (20, 5)
    assert KernelSketch.from_state(sketch.to_state()).to_state() == sketch.to_state()
    assert KernelSketch.empty(20, 5).relative_error == 0.0


def test_normalised_representations_count_alike():
    a, b = random_representations(2)
    sketch = KernelSketch.empty(20, 19).add_replies([1000 * a, b], [1.0, 1.0], num_clients=2, normalise=True)
    kernels = [centred_kernel(part) / centred_kernel(part).trace() for part in (a, b)]
    torch.testing.assert_close(kernel_of(sketch), sum(kernels) / 2, rtol=1e-4, atol=1e-6)
