"""``python -m flexnsa``."""

from flexnsa.cli import main

if __name__ == "__main__":
    main()
