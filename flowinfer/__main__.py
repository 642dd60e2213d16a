"""`python -m flowinfer`."""

from flowinfer.cli import main

main()
