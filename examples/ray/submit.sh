#!/bin/sh
# Submits a run as a job to a running Ray cluster: sh submit.sh http://HEAD:8265. The job continues when this program
# ends. All nodes need lockstep, and must reach the run's folder by the same path.
exec ray job submit --address "$1" --submission-id lockstep-free --no-wait -- \
    lockstep train impala-atari --scheme.lag async --scheme.shards 16 --layout ray:a4+-l1,restarts=20 \
    --display plain --run /SHARED/free
