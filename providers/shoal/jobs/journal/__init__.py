"""Read and change the rows of jobs and locks in the store."""
