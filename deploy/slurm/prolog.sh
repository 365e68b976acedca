#!/bin/bash
# Prolog= in slurm.conf: starts the user's node on this host, unless it runs. It is ready once it has
# joined the coordinator; trainers wait for it. A prolog that fails takes the host out of service, so
# this one does not.
PATH=/usr/sbin:/usr/bin:/sbin:/bin
systemctl start --no-block "dataplane-node@$SLURM_JOB_USER" || true
