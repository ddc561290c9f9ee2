"""Reads runs and shows them: plots, reports and comparisons of methods."""
