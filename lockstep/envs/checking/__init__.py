"""Checks of environments before they are trained on."""
