"""Shows a run in a notebook: pandas frames, HTML, plots."""
