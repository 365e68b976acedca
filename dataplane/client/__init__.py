"""What a training process links: no torch, no grpc."""
