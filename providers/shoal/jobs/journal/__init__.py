"""The rows of jobs and locks, and the only ways they change."""
