"""The programs of the corpus, one file a family; `tests/faults/corpus.py` says how to read them."""
