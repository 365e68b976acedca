"""The part that a training process imports: no torch, no grpc.

The door: `session`, `endpoint`, `launch`, `identity`, `topology` and `meshes` to open a job;
`mount` for devices that read its memory; `stream`, `state`, `mixing`, `describe` and `statistics`
to read it.
"""
