"""``python -m dlrm.benchmark``."""

import sys

from dlrm.benchmark import main

if __name__ == "__main__":
    sys.exit(main())
