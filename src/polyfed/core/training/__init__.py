"""The training loop of one client or of a cohort, its configuration and its losses."""
