"""``python -m medha`` is the command ``medha``."""

from medha.cli import main

if __name__ == "__main__":
    main()
