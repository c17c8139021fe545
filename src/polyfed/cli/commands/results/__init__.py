"""The commands `report`, `predict` and `export`."""
