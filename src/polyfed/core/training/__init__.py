"""Trains one client, or many clients with the same architecture at once: the training loop, its configuration, its
precision and its losses.
"""
