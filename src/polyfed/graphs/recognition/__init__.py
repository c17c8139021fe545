"""Recognises in a traced program which operations are layers of the catalogue, activations or joins."""
