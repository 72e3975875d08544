"""Labs and their grader."""
