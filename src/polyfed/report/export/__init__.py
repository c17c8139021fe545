"""Exports a trained network as a folder that needs neither polyfed nor the data."""
