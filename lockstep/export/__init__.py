"""Trained policies for others: files that run without lockstep, and runs on the Hugging Face Hub."""
