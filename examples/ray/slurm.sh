#!/bin/bash
# Starts Ray on all nodes of a Slurm allocation, and a run on it: sbatch slurm.sh. The same command continues the run.
#SBATCH --job-name=lockstep
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=4
#SBATCH --time=12:00:00
set -euo pipefail

run=${RUN:-$PWD/runs/free} # on a file system that all nodes share
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
address=$head:${PORT:-6379}
export RAY_worker_niceness=0 # as high a priority as other programs
RAY_AUTH_TOKEN=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n') # of this job alone: nobody else may use its nodes
export RAY_AUTH_TOKEN RAY_AUTH_MODE=token

if [ -e "$run" ]; then
    command=(lockstep resume "$run" --display plain)
else
    command=(lockstep train impala-atari --scheme.lag async --scheme.shards 16 --layout "ray:a4+-l1,restarts=20"
        --display plain --run "$run")
fi

# Every node starts Ray. The first one runs the command, and ends Ray afterwards.
srun --kill-on-bad-exit ray symmetric-run --address "$address" --min-nodes "$SLURM_JOB_NUM_NODES" \
    --num-cpus "$SLURM_CPUS_PER_TASK" --include-dashboard=false -- env "RAY_ADDRESS=$address" "${command[@]}"
