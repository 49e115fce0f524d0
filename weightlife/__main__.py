# SPDX-License-Identifier: Apache-2.0
"""``python -m weightlife``: the command line."""

from __future__ import annotations

import sys

from weightlife.cli import main

if __name__ == "__main__":
    sys.exit(main())
