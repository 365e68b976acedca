#!/bin/bash
# Epilog= in slurm.conf: stops the user's node when the last job of the user has left this host.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
others=$(squeue --noheader --format=%A --user="$SLURM_JOB_USER" --nodelist="$SLURMD_NODENAME" \
  --states=CONFIGURING,RUNNING,SUSPENDED) || exit 0 # the controller is away: leave it running
if ! grep -qvx "$SLURM_JOB_ID" <<< "$others" || [ -z "$others" ]; then
  systemctl stop --no-block "dataplane-node@$SLURM_JOB_USER" || true
fi
