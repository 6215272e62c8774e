"""Drives the routing core in virtual time against modelled engines."""
