"""Read bytes from object stores.

The door: `connect` finds the store of a url, `base` is its interface, `expand` finds the objects
that a user's urls name, in the `layouts` of known folders. `urls` parses urls, `url_policy` says
which may be opened, `reads` has pieces, etags and races, `faults` the tables of what fails and what
is tried again, `retry` when, `outage` what processes exchange about stores. `local` is for files of
this machine, and `obstore_store` for the library that reads the others.
"""
