"""The commands `flower` and `doctor`."""
