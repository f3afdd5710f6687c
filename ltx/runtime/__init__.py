"""What runs functions on ranks: workers of a pool (``pool``), threads (``simulation``), an elastic run, ``ltx run``."""
