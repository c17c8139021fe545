"""Provides tests for a federated learning method: the contract that every method must fulfil, and small federations
that a method trains on quickly.
"""

from polyfed.testing.algorithm_contract import AlgorithmContract
from polyfed.testing.method_example import MethodExample, example_of
from polyfed.testing.run_equality import assert_runs_equal, without_durations
from polyfed.testing.small_clients import SmallNet, small_adapter_clients, small_clients, small_image_clients

__all__ = [
    "AlgorithmContract",
    "MethodExample",
    "SmallNet",
    "assert_runs_equal",
    "example_of",
    "small_adapter_clients",
    "small_clients",
    "small_image_clients",
    "without_durations",
]
