"""Plays and scores policies: evaluation, acting in users' environments, statistics and videos."""
