"""Classroom labs: files with blanks (`exercises/`) and the checks that grade them, one module for each lab.

Solutions are not part of the package, so that no student gets one by accident.
"""

from . import lab1, lab2, lab3, lab4, lab5, lab6, lab7

LABS = {module.lab.number: module.lab for module in (lab1, lab2, lab3, lab4, lab5, lab6, lab7)}
