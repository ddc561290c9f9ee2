"""Settings: how they are written, checked, named and kept, and the layout and options of a run."""
