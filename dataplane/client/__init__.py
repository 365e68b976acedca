"""The part of Dataplane that runs in a training process: no torch, no grpc.

The door: `session`, `endpoint`, `launch`, `identity`, `topology` and `meshes` to open a job;
`mount` for devices that read its memory; `stream`, `state`, `stages`, `mixing`, `describe` and
`statistics` to read it.
"""
