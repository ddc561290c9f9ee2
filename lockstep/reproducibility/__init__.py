"""Checks that runs are reproducible: verify, diff and replay."""
