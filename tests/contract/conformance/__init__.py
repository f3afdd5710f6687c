"""Every operation through one table: see ``table.py``."""
