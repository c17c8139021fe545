"""Provides the base classes and functions that several families of methods share: weighted averaging, personal
networks, class means and public examples.
"""
