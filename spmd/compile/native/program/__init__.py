"""The byte code of the executor: its steps, their encoding, and programs on the disk."""
