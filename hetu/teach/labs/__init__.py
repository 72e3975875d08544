"""Labs: a source with its solution, checks, and a grader that stays sound whatever a student knows.

`inside/` runs with the student's code, in a process of its own (`process.py`, `ranks.py`) that is asked and never
believed; `student.py` is what checks see of it, `checks.py` what a lab is. The labs themselves stand outside of the
package, in `tutorials/labs`.
"""

from .checks import Check, Lab, Outcome, different, first
from .process import Limits
from .ranks import Message, Ran
from .student import Student, Wrong

__all__ = ["Check", "Lab", "Limits", "Message", "Outcome", "Ran", "Student", "Wrong", "different", "first"]
