"""Generated from proto/dataplane/rpc/v1; never edited."""
