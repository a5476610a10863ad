"""``python -m provision.cli``: the program ``oeprov``."""

from provision.cli.main import main

if __name__ == "__main__":
    main()
