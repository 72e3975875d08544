"""Beside the student's code of lab 6: the sum, and what has become of the rank's own array."""


def ring_all_reduce(student, comm, x):
    return student.ring_all_reduce(comm, x), x
