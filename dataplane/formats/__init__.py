"""Shard formats: bytes to Arrow, one format per file.

The door: `registry` finds a format, and `base` is its interface. `arrays`, `nulls`, `joint_types`,
`conform` and `unsupported` compare and convert types; `faults` has the errors of damaged bytes;
`source` reads a shard, `folders` adds the keys of its folders, `tar` knows the keys of its samples,
`litdata` and `megatron` the files that describe theirs, and `index_frames` carries indexes between
processes.
"""
