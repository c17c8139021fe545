"""Runs federations whose clients are made when they are drawn."""
