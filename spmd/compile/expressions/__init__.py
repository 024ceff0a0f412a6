"""What an elementwise group computes: scalar operations, index maps, and its kernel."""
