"""`python -m dataplane` is `dataplane`."""

from dataplane.cli import main

if __name__ == "__main__":
    main()
