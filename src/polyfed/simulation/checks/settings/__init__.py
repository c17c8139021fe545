"""Checks that the settings of a run suit its method and its clients."""
