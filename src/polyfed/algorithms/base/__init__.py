"""Bases that several families share: the weighted mean, a network of one's own, class means, public examples."""
