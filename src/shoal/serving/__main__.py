"""`python -m shoal.serving`."""

from shoal.serving.main import main

main()
