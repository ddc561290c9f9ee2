"""Trains the same experiment with other libraries, and measures how fast they and lockstep are."""
