"""Renders what the page shows in addition to the scores: single methods' views, updates, sites' data, audits."""
