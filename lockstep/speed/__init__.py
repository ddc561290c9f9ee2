"""How fast an experiment runs on this machine: its limit, the losses, and the best layout."""
