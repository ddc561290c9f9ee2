#!/bin/sh
# A run as a job of a Ray cluster that exists: sh submit.sh http://HEAD:8265. The job goes on when this program ends.
# Ray tells the command where the cluster is. All nodes need lockstep, and the run's folder by the same path.
exec ray job submit --address "$1" --submission-id lockstep-free --no-wait -- \
    lockstep train impala-atari --scheme.lag async --scheme.shards 16 --layout ray:a4+-l1,restarts=20 \
    --display plain --run /SHARED/free
