"""``python -m inferencecenter`` runs the command line."""

from inferencecenter.cli import main

if __name__ == "__main__":
    main()
