"""Doom: what its scenarios and matches share, and matches of several players."""
