"""Gradient synchronisation: buckets, the schedule that overlaps them with the backward pass, and the marker."""
