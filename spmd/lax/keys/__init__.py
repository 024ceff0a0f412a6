"""Keys and random bits: the default generator, XLA's, and keys as the words they are made of."""
