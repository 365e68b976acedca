"""Who may do what: tokens, TLS, and which urls a served node may open. No gRPC."""
