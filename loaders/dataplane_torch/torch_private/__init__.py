"""Everything private of torch that dataplane uses, under names of ours; no other module touches it.

torch's DataLoader has no public way to replace its workers, so its private classes, functions and
attributes are part of what we build on. Each has one name here, and a docstring that says what it
is in torch and what we rely on. All of them exist in torch 2.6, the oldest version we support, and
in every one that `make test-others` runs; where versions differ, the docstring says how, and the
difference ends here.

A torch that lacks one of them raises VersionMismatch when dataplane_torch is imported, or, for
attributes that torch's constructors set, when the first pass begins. What only some builds or
process groups have is the exception: its docstring says what happens without it.
"""
