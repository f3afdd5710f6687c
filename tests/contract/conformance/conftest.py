"""Which files pytest leaves alone."""

from __future__ import annotations

# A script that is run by hand: pytest would import it for its doctests, and it needs JAX.
collect_ignore = ["jax_table.py"]
