"""Adapts polyfed to this machine's memory and number of cores."""
