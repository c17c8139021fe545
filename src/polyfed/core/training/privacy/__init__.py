"""Protects single examples, or single patients, in local training by differentially private gradients."""

from polyfed.core.training.privacy.options import Privacy

__all__ = ["Privacy"]
