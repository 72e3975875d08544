"""Labs: a source with its solution, checks, and a grader that stays sound whatever a student knows.

`inside/` runs with the student's code, in a process of its own (`process.py`, `ranks.py`) that is asked and never
believed; `student.py` is what checks see of it, `checks.py` what a lab is. The labs themselves stand outside of the
package, in `tutorials/labs`.
"""

from .checks import Check, Lab, Outcome, different, first
from .process import Allowance
from .ranks import Ran, Switched
from .student import NoAnswer, Student

__all__ = ["Check", "Lab", "Allowance", "Switched", "Outcome", "Ran", "Student", "NoAnswer", "different", "first"]
