"""Training: the loops, and what prepares, resumes, records and shows a run."""
