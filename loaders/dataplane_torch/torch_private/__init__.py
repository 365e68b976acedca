"""All private names of torch that dataplane uses, under names of our own; no other module uses
them.

torch's DataLoader has no public way to replace its workers, so we depend on its private classes,
functions and attributes. Each has one name here, and a docstring with its name in torch and what we
rely on. All of them exist in torch 2.6, the oldest version we support, and in every version that
`make test-others` runs. If versions differ, the docstring says how, and callers see no difference.

If a torch lacks one of them, importing dataplane_torch raises VersionMismatch; for attributes that
torch's constructors set, the first pass does. Names that only some builds or process groups have
are the exception: their docstrings say what happens without them.
"""
