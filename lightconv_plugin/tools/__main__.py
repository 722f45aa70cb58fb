"""`python -m lightconv_plugin.tools …` is the `lightconv` command without an installed script."""

import sys

from lightconv_plugin.tools.cli import main

if __name__ == "__main__":
    sys.exit(main())
