"""Values, options and errors that every room shares. The door: `records`, `config`, `errors`,
`ledger` and `changes`; `redact` and `typed` for texts and types on their way out and in.
"""
