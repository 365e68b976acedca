"""The Dataplane service: it turns shards in object storage into batches beside the trainer."""
