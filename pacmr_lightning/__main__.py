"""``python -m pacmr_lightning`` is the ``pacmr`` command."""

from .cli import main

if __name__ == "__main__":
    main()
