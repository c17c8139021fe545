"""Estimates scores and differences over the folds of a cross-validation, and over repeated splits."""
