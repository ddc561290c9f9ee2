"""How fast an experiment runs on this machine: its limit, what is lost on the way, and the layout to take."""
