"""What benchmarks/gpu.py checks and measures, one module for each kind of step."""
