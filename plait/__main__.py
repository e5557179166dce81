"""`python -m plait` is the command `plait`, where the package was not installed as one."""

from plait.tools.cli import main

if __name__ == "__main__":
    main()
