"""Exports trained policies as files that run without lockstep, and runs to the Hugging Face Hub."""
