"""The fusion pass and its parts."""
