"""Why a call that looks wrong is right: reasons by class, as patterns of the callable, its argument and the mistake.

Some reasons need no table, since `judge.py` finds them: "asked again" (the same call twice), "has a default" (an
argument is left out), "optional" (None, and the annotation says so), "in its range" (the annotation says which numbers
are meant), and "computes" (what was made are nodes that run and are of the types that they say: broadcasting,
promotion, any rank).
"""

Row = tuple[str, str, str]  # patterns of the callable, the argument and the class of the mistake

RIGHT: dict[str, list[Row]] = {
    "any text is a name": [("*", "name", "kind: text"), ("*", "name", "range: no such")],
    "endless": [("ht.fit", "epochs", "range: huge")],
}
