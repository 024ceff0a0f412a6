"""Starting the ranks of a job and watching over them."""
