"""Attacks the messages of a round: what a curious server reconstructs of a client's images and label counts."""
