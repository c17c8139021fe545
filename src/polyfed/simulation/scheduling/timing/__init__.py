"""Simulates time: how fast each client computes and sends, and when it is available."""
