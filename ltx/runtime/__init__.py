"""What runs functions on ranks: workers of a pool (``pool``), an elastic run, ``ltx run``."""
