"""The labs: solutions pass their checks, blanks pass none, wrong answers fail the check that is about them."""

from __future__ import annotations

import zipfile
from pathlib import Path

import pytest

from hetu import cli
from hetu.core.graph import OPS
from hetu.teach.lab import EXERCISES
from hetu.teach.labs import LABS
from hetu.teach.labs.grading import Lab, report

SOLUTIONS = Path(__file__).parent.parent / "tutorials" / "solutions"
BLANK = "raise NotImplementedError\n"
every_lab = pytest.mark.parametrize("lab", LABS.values(), ids=lambda lab: lab.file)

# Lab, a piece of its solution, what a student might have written instead, and words of the check that must fail.
MISTAKES = [
    (1, "x / (scale + xp.abs(x))", "x / (1 + xp.abs(x))", "`scale` is respected"),
    (1, "x / (scale + xp.abs(x))", "x / (scale + x)", "the values are right"),
    (1, "return x / (scale + xp.abs(x))", "import numpy as np\n    return x / (scale + np.abs(x))", "not from NumPy"),
    (1, "g * scale /", "scale /", "finite differences"),
    (1, "ht.abs(x)) ** 2", "ht.abs(ht.stop_gradient(x))) ** 2", "the gradient of the gradient"),
    (1, "xp.divide(x, out, out=out)", "xp.divide(out, x, out=out)", "`into` writes"),
    (1, "xp.add(out, scale, out=out)", "out[...] = out + scale", "makes no other array"),
    (2, "[(self, other.value), (other, self.value)]", "[(self, self.value), (other, other.value)]", "a product"),
    (2, "1 - y * y", "1 - y", "tanh"),
    (2, "found[number] * local", "local", "slopes of a chain"),
    (2, "found.get(i, 0.0) + ", "", "used twice"),
    (2, "found.get(w, 0.0)", "found[w]", "does not matter"),
    (2, "reversed(order)", "sorted(order, key=lambda n: n is not output)", "complete before"),
    (2, "elif number not in seen", "elif True", "one turn"),
    (3, "if not inputs or", "if True or", "2 * 3 becomes"),
    (3, 'i.role.value != "constant" for i in inputs', "i.inputs for i in inputs", "only what is constant"),
    (3, "i in inputs)", "i in node.inputs)", "the next fold"),
    (3, "if not inputs or any", "if any", "left alone"),
    (3, "ht.constant(ht.evaluate(node.op.make(inputs, node.attrs)))",
        "ht.constant(ht.evaluate(node.op.make(inputs, node.attrs)).tolist())", "dtypes"),
    (3, " or isinstance(node.type, tuple)", "", "several outputs"),
    (3, "if any(not isinstance(size, int) for size in node.shape)", "if False", "sizes that are not known"),
    (4, "last[name] = index", "last.setdefault(name, index)", "until its last reader"),
    (4, "last | dict.fromkeys(results, len(program) - 1)", "last", "results live"),
    (4, "        last[instruction.name] = index\n", "", "nobody reads"),
    (4, "peak = max(peak, live)\n        live -= sum(i", "live -= sum(i", "the peak of a chain"),
    (4, "if last[i.name] == index)", "if i.name in instruction.reads)", "long-lived"),
    (4, "if overwritten is None:", "if True:", "may be overwritten"),
    (4, "if sizes[name] == instruction.nbytes", "if True", "of another size"),
    (4, "in instruction.reads if last[name] == index", "in instruction.reads", "read later"),
    (5, "p - rate", "p + rate", "the first step"),
    (5, ", m: self.beta2 * m + (1 - self.beta2) * g", "", "kept in a slot"),
    (5, "ht.sign(self.beta1 * m + (1 - self.beta1) * g)", "ht.sign(g)", "six steps"),
    (5, "self.beta1", "0.9", "both betas"),
    (5, "ht.astype(p - rate * direction, p.dtype)", "p - rate * direction", "a schedule"),
    (6, "n, rank =", "if comm.world_size == 1:\n        return None\n    n, rank =", "one rank"),
    (6, "chunks[theirs] += arrived", "chunks[theirs] = arrived", "two ranks"),
    (6, "(rank + 1 - step) % n, (rank - step) % n", "(rank - step) % n, (rank - step - 1) % n", "four ranks"),
    (6, "np.array_split(x.copy(), n)", "x.copy().reshape(n, -1)", "do not divide"),
    (6, "return np.concatenate", "if not chunks[-1].size:\n        return None\n    return np.concatenate", "fewer"),
    (6, "x.copy()", "x", "not changed"),
    (6, "right, left = (rank + 1) % n, (rank - 1) % n", "right, left = (rank - 1) % n, (rank + 1) % n", "right neigh"),
    (6, "comm.exchange([(right, chunks[mine])], [(left, arrived)])",
        "comm.exchange([(right, chunks[mine])] * 2, [(left, arrived)] * 2)", "no rank sends more"),
    (7, "results.get((x, w))", "results.get((x, w), DUP) if (x, w) != (DUP, DUP) else 0", "nothing is split"),
    (7, "(0, DUP): 0,", "(0, DUP): DUP,", "data parallel"),
    (7, "(DUP, 1): 1,", "(DUP, 1): 0,", "tensor parallel: x"),
    (7, "(1, 0): SUM,", "(1, 0): DUP,", "second half"),
    (7, "(DUP, SUM): SUM,", "(DUP, SUM): SUM, (SUM, SUM): SUM,", "added up"),
    (7, "(1, 0): SUM,", "(1, 0): SUM, (0, 0): 0,", "all sixteen"),
    (7, '"all_reduce" if after == DUP', '"all_gather" if after == DUP', "whole matrices"),
    (7, 'else "reduce_scatter"', 'else "all_reduce"', "toward parts"),
]  # fmt: skip


def solution(lab: Lab) -> str:
    return (SOLUTIONS / lab.file).read_text("utf-8")


def states(lab: Lab, path: Path) -> dict[str, str]:
    return {outcome.check.wanted: outcome.state for outcome in lab.grade_file(path)}


@every_lab
def test_the_solution_passes(lab: Lab) -> None:
    outcomes = lab.grade_file(SOLUTIONS / lab.file)
    assert [o.state for o in outcomes] == ["pass"] * len(lab.checks), report(lab, outcomes)
    assert len(lab.checks) >= 4


@every_lab
def test_the_blanks_pass_nothing(lab: Lab) -> None:
    assert "pass" not in states(lab, EXERCISES / lab.file).values()


@every_lab
def test_the_solution_is_the_exercise_with_its_blanks_filled(lab: Lab) -> None:
    rest = solution(lab)
    for part in (EXERCISES / lab.file).read_text("utf-8").split(BLANK):
        place = rest.find(part)
        assert place >= 0, part
        rest = rest[place + len(part) :]


@every_lab
def test_no_hint_gives_the_answer(lab: Lab) -> None:
    exercise = (EXERCISES / lab.file).read_text("utf-8")
    answers = {row.strip() for row in solution(lab).splitlines() if row.strip() and row not in exercise}
    words = " ".join(c.hint + c.wanted for c in lab.checks)
    assert answers and not [a for a in answers if len(a) > 12 and a in words]


@pytest.mark.parametrize(("number", "right", "wrong", "wanted"), MISTAKES, ids=lambda v: str(v)[:40])
def test_a_mistake_fails_its_check(number: int, right: str, wrong: str, wanted: str, tmp_path: Path) -> None:
    lab = LABS[number]
    text = solution(lab)
    assert right in text
    file = tmp_path / lab.file
    file.write_text(text.replace(right, wrong), "utf-8")
    failed = [w for w, state in states(lab, file).items() if state == "FAIL"]
    assert any(wanted in w for w in failed), failed


def test_every_check_has_a_mistake() -> None:
    for lab in LABS.values():
        for check in lab.checks:
            if not check.wanted.startswith(("a chain of 5,000", "the training step of")):
                assert any(n == lab.number and w in check.wanted for n, _, _, w in MISTAKES), check.wanted


# -- the grader ----------------------------------------------------------------------------------------------------


def test_a_report_says_what_passes_what_fails_and_a_hint(tmp_path: Path) -> None:
    lab = LABS[2]
    file = tmp_path / lab.file
    text = (EXERCISES / lab.file).read_text("utf-8")
    file.write_text(text.replace(BLANK, "return Number(self.value * other.value, [(self, 1.0), (other, 1.0)])\n", 1))
    shown = report(lab, lab.grade_file(file))
    assert (
        "FAIL   a product knows its slopes\n         the slopes: got [1. 1.], wanted [5. 3.]\n         hint: " in shown
    )
    assert "blank  tanh knows its slope\n  blank" in shown
    assert shown.endswith("0 of 8 passed, 7 not written yet")


def test_an_error_is_shown_with_the_students_line(tmp_path: Path) -> None:
    lab = LABS[4]
    file = tmp_path / lab.file
    file.write_text("def last_use(program, results):\n    return program.nothing\n")
    first = lab.grade_file(file)[0]
    assert first.seen == "AttributeError: 'list' object has no attribute 'nothing'\nin line 2: return program.nothing"
    file.write_text("def last_use(:\n")
    assert "SyntaxError: invalid syntax" in lab.grade_file(file)[0].seen


def test_ranks_that_wait_for_ever_are_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hetu.teach.labs.lab6.DEADLINE", 0.2)
    file = tmp_path / "lab6.py"
    file.write_text(
        "import numpy as np\ndef ring_all_reduce(comm, x):\n"
        "    y = np.empty_like(x)\n    comm.exchange([], [((comm.rank + 1) % comm.world_size, y)])\n    return y\n"
    )
    two = LABS[6].grade_file(file)[1]
    assert two.state == "FAIL" and "DeadlineError" in two.seen


def test_students_operators_are_forgotten() -> None:
    before = dict(OPS)
    LABS[1].grade_file(SOLUTIONS / LABS[1].file)
    assert before == OPS


# -- the command ---------------------------------------------------------------------------------------------------


def test_export_packs_the_exercises_and_no_solution(tmp_path: Path) -> None:
    first, second = tmp_path / "labs.zip", tmp_path / "again.zip"
    assert cli.main(["lab", "export", str(first)]) == cli.main(["lab", "export", str(second)]) == 0
    assert first.read_bytes() == second.read_bytes()
    with zipfile.ZipFile(first) as packed:
        texts = {name: packed.read(name).decode() for name in packed.namelist()}
    assert set(texts) == {"hetu-labs/README.md", *(f"hetu-labs/{lab.file}" for lab in LABS.values())}
    for lab in LABS.values():
        assert BLANK in texts[f"hetu-labs/{lab.file}"] and lab.title in texts["hetu-labs/README.md"]
    assert not [p for p in EXERCISES.parent.rglob("*") if "solution" in p.name]


def test_a_student_exports_works_and_checks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab", "export"]) == 0
    with zipfile.ZipFile("hetu-labs.zip") as packed:
        packed.extractall()
    assert cli.main(["lab", "check", "3"]) == 1
    monkeypatch.chdir(tmp_path / "hetu-labs")
    Path(LABS[3].file).write_text(solution(LABS[3]))
    assert cli.main(["lab", "check", "3"]) == 0
    assert capsys.readouterr().out.endswith("7 of 7 passed\n")


def test_the_list_and_wrong_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["lab"]) == 0
    assert [row[0] for row in capsys.readouterr().out.splitlines()] == [str(n) for n in LABS]
    assert cli.main(["lab", "check", "3"]) == 2
    assert "fix: get the exercises with `hetu lab export`" in capsys.readouterr().err
    assert cli.main(["lab", "export", "nowhere/labs.zip"]) == 2
    assert "fix: name a file in a folder that exists" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["lab", "check", "99"])
