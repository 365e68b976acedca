"""All messages between processes. Protobuf and gRPC stay inside this package."""
