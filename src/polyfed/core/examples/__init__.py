"""Holds examples as tensors: inputs of several parts, conversion from users' types, checks for NaN."""
