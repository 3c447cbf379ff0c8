"""``python -m flexnsa``."""

from flexnsa.lm.cli import main

if __name__ == "__main__":
    main()
