"""``python -m tests.mutants``."""

from tests.mutants.runs import main

if __name__ == "__main__":
    raise SystemExit(main())
