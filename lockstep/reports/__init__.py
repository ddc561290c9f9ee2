"""Reads finished runs and draws them: plots, reports and comparisons of methods."""
