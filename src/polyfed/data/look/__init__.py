"""Describes the data of several sites side by side before anything is trained, from counts and sums of each site."""
