"""From steps to steps: overlap, prepacking, threads, memory plan, cost model."""
