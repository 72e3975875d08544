"""Beside the student's code of lab 4: rows become its `Instruction`s."""


def rows(student, program):
    return [student.Instruction(name, nbytes, tuple(reads)) for name, nbytes, reads in program]


def last_use(student, program, results):
    return student.last_use(rows(student, program), results)


def peak_bytes(student, program, results):
    return student.peak_bytes(rows(student, program), results)


def peak_in_place(student, program, results):
    return student.peak_in_place(rows(student, program), results)
