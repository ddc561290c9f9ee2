"""Stand-ins for Slurm's programs."""

from __future__ import annotations

from pathlib import Path


def script(path: Path, text: str) -> None:
    """Write a program."""
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def make(folder: Path) -> Path:
    """Programs that note what they were told in a folder; returns where they are."""
    programs = folder / "bin"
    programs.mkdir()
    script(programs / "srun", "exit 1")
    script(programs / "sbatch", f'cp "$1" {folder}/submitted; echo "Submitted batch job 7"')
    script(programs / "squeue", f"cat {folder}/jobs")
    script(programs / "scontrol", f'echo "$@" >> {folder}/requeued')
    (folder / "jobs").touch()
    return programs
