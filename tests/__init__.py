"""The tests mirror the package's tree; README.md is the map."""

from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
