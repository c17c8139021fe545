"""Contains the recipes that polyfed ships: one YAML file per experiment; `polyfed run NAME` runs it."""
