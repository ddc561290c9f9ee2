"""Where a run's processes are: here, on this machine, under torchrun, on Ray, or in a Slurm job."""
