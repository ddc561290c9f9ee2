"""Environments of several agents, and who plays those that do not learn."""
