"""Monitors a run: progress display, experiment trackers, norms of updates, and validation losses."""
