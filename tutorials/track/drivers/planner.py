"""Beside lab 10: answers as plain lists, and errors by their names."""


def divide(student, costs, stages):
    try:
        return [int(bound) for bound in student.divide(costs, stages)]
    except ValueError:
        return "ValueError"


def plans(student, ranks, batch):
    return [[p["data"], p["tensor"], p["stages"], p["micro_batches"]] for p in student.plans(ranks, batch)]


def choose(student, layers, batch, machine):
    try:
        p = student.choose(layers, batch, machine)
    except ValueError as error:
        return "ValueError" if "stages" not in str(error) else str(error)
    return [p["data"], p["tensor"], p["stages"], p["micro_batches"]]
