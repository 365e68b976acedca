"""Who may do what: tokens, TLS, and which urls a served node may open. No gRPC.

The door: `security` checks a caller, and `tokens` has the rules of each call; `jwts`,
`node_identity` and `private_file` are the credentials, `tls` and `environment` use them; `urls`
says which urls may be read, and `admission` which connections make way.
"""
