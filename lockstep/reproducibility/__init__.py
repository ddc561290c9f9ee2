"""Checks that runs are what they claim to be: verify, diff and replay."""
