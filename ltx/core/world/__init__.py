"""Worlds: init, launchers' environments, process groups."""
