"""Starts a run's processes: in this process, on this machine, under torchrun, on Ray, or in a Slurm job."""
