"""The world of processes: read from the environment, set up and taken down, and started from a notebook.

``world`` reads the environment, ``init`` sets up process groups and axes, ``pool`` runs functions on worker processes
that stay alive, ``per_rank`` holds what they return. ``worker`` is what such a process runs; nothing imports it.
"""
