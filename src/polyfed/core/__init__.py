"""Defines what all other packages build on: the interface of a federated method, examples, local training, evaluation,
random seeds and errors.
"""
