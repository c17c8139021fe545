"""Adapts polyfed to the memory and number of cores of the machine on which it runs."""
