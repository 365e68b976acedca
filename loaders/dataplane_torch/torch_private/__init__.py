"""All private names of torch that dataplane uses, under names of our own; no other module uses
them.

torch's DataLoader has no public way to replace its workers, so we depend on its private classes,
functions and attributes. Each has one name here, and a docstring with its name in torch and what we
rely on. All of them exist in torch 2.6, the oldest version we support, and in every version that
`make test-others` runs. If versions differ, the docstring says how, and callers see no difference.

If a version of torch lacks one of these names, importing dataplane_torch raises VersionMismatch; if
it lacks an attribute that torch's constructors set, the first pass raises. For names that only some
builds or process groups have, the docstrings say what happens without them.
"""
