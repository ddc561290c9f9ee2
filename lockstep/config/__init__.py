"""Settings: their values, checks, names and files, and the layout and options of a run."""
