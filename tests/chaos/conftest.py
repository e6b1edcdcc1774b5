"""Trainers under control are those of the end-to-end tests."""

import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).parents[1] / "e2e"))
