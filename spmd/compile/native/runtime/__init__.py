"""What runs programs: executor, allocator, thread pool, asynchronous queue."""
