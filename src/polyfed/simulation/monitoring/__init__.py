"""Monitors a run: progress display, trackers, norms of updates, and validation losses."""
