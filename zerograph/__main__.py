"""``python -m zerograph``: the command line where no script was installed."""

from zerograph.cli import main

if __name__ == "__main__":
    main(prog_name="zerograph")
