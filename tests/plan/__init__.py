"""Tests of the order, and what they share: golden vectors and plain shuffles."""
