"""Defines what all other packages build on: the contract of a method, data, local training, evaluation, random numbers,
errors.
"""
