"""Training: the loops, and the code that prepares, resumes, records and displays a run."""
