"""How families of operations run along split dims, one family a file."""
