"""Doom: the common parts of scenarios and matches, and matches of several players."""
