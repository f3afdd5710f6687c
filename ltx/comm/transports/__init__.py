"""Shorter ways than the network between processes of one machine."""
