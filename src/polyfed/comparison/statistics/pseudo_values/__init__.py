"""Computes jackknife pseudo-values: what each test example, or each group of them, contributes to a score."""
