"""What is behind a stage under torch's names."""
