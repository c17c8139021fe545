"""Combines clients' replies so that a few wrong ones, sent by mistake or on purpose, cannot ruin the result."""
