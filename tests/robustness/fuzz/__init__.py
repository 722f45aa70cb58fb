"""Property-based tests of the operators: random cases (strategies.py) held against float64 (checks.py), shrunk.

`scripts/dev/fuzz.sh MINUTES` runs them for as long as one likes (run.py); test_fuzz.py a few, always the same, and
every case that ever failed.
"""
