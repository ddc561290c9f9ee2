"""This process and its machine: child processes, cores, output, and settings of torch."""
