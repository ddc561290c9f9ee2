"""Settings: types, checks, names and JSON; the layout and options of a run; loading users' files."""
