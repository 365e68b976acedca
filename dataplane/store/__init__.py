"""Read bytes from object stores.

The door: `connect` finds the store of a url, `base` is its interface, `expand` finds the objects
that a user's urls name, in the `layouts` of known folders and the `tables` of Delta and Iceberg.
`urls` parses urls, and `url_policy` says which of them may be opened. `reads` has pieces, etags and
races, `faults` the table of faults and their retries. `retry` makes the retries, and `outage`
exchanges outages and pauses between processes. `local` reads files of this machine, and
`obstore_store` most other stores, large ranges over `connections`.
"""
