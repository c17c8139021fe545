"""Reads what methods have learned (aggregation weights, similarity of representations, network architectures), and
draws searched cells and learning curves.
"""
