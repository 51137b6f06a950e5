"""What the public packages stand on; its names may change with every release."""
