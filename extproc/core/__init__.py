"""Decides: pure functions and state machines without I/O, clock, entropy or logging."""
