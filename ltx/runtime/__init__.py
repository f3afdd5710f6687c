"""What runs functions on ranks: workers of a pool (``pool``) and ``ltx run``."""
