"""Exports a trained network as a folder that can be used without polyfed and without the data."""
