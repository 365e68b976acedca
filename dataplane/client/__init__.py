"""The part that a training process imports: no torch, no grpc."""
