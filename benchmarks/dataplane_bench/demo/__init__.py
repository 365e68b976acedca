"""The demo: shards in S3 -> a daemon -> two DDP ranks -> SIGKILL in mid-epoch -> exact resume."""
