"""The runtime of programs: executor, allocator, thread pool, asynchronous queue."""
