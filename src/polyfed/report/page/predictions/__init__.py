"""Renders what the predictions for test examples show: curves, confusion tables, subgroups, images."""
