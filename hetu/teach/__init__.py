"""For the classroom: labs and their grader, cells on many ranks, and the doctor of an installation."""
