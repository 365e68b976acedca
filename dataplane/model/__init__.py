"""The values, options and errors that every room shares.

The door: `records`, `config`, `errors`, `ledger` and `changes`; `redact` removes secrets from
texts, and `typed` prepares types for decoding.
"""
