"""What a run keeps: its folder, ledger, checkpoints and metrics."""
