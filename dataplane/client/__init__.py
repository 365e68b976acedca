"""The part that a training process imports: no torch, no grpc.

The door: `session`, `endpoint`, `launch`, `identity` and `topology` to open a job; `stream`,
`state` and `statistics`.
"""
