"""Models that are traced and cut, under torch's names."""
