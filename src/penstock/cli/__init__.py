"""The command line: ``penstock`` and ``python -m penstock``."""
