"""Progress, trackers, norms of updates and validation losses of a run."""
