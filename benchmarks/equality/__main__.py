"""`python -m benchmarks.equality`."""

from benchmarks.equality.comparison import main

main()
