"""`python -m lightconv_plugin …`: the `lightconv` command without an installed script."""

import sys

from lightconv_plugin.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
