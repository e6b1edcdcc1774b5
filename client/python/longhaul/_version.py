"""The version of everything built from this tree; client/include/longhaul/longhaul.h has the same."""

__version__ = "0.1.0"
