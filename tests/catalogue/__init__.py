"""Programs, each once: a model as a user writes it, with its batch, its loss and what is expected."""
