"""Beside the student's code of lab 10: rows become its models and machines."""


def memory(student, model, plan):
    return student.memory(student.Model(*model), tuple(plan))


def seconds(student, model, machine, plan, parts):
    return student.seconds(student.Model(*model), student.Machine(*machine), tuple(plan), parts)


def best(student, model, machine, ranks, parts):
    return student.best(student.Model(*model), student.Machine(*machine), ranks, parts)
