"""Describes the data of several sites side by side before training, from counts and sums that each site computes."""
