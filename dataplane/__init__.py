"""The Dataplane service: shards in object storage to finished batches beside the trainer."""
