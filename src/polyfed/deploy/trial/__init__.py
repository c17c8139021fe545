"""Creates the files of a deployment, and runs a deployment on one machine to try it out (a trial)."""
