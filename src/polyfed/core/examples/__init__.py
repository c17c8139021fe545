"""Holds examples as tensors: inputs that may be nested, conversion from users' types, and checks for NaN."""
