"""Long searches for faults: ``make campaign ARGS=NAME`` runs one and prints its table."""
