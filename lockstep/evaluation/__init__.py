"""Plays policies and scores them: evaluation, acting elsewhere, statistics and videos."""
