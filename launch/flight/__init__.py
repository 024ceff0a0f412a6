"""The flight files of a job, read: diagnosis, timeline, statistics."""
