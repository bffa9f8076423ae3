"""`python -m tools.train`."""

from tools.train.run import main

main()
