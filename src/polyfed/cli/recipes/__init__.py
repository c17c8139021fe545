"""Recipes: one YAML file per experiment; `polyfed run NAME` runs it."""
