"""`python -m router ...` is `splitserve ...`."""

from router.cli import main

main()
