"""Renders what the page shows beside the scores: single methods' views, updates, sites' data, audits."""
