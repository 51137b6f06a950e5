"""How a schedule under torch's names takes a batch and runs it."""
