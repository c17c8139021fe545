"""Holds examples as tensors: nested inputs, conversion from users' types, checks for NaN."""
