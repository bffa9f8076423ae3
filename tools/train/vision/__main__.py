"""`python -m tools.train.vision`."""

from tools.train.vision.run import main

main()
