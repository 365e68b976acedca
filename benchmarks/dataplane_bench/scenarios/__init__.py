"""One file a question; each opens with it and with its physical bound."""
