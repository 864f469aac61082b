"""`python -m fedalloy` is the command `fedalloy`."""

from fedalloy.cli.app import main

if __name__ == "__main__":
    main()
