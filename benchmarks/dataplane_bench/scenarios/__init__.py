"""One file per question; each begins with the question and its physical bound."""
