"""What is measured, and the child process that measures it."""
