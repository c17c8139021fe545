"""Helps to build networks: checks of sizes, convolutional stacks, calls of users' functions."""
