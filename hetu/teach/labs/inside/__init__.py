"""What runs in the process of a student's code: it needs NumPy, and nothing else of hetu.

`codec.py` is what travels (the grader imports it, too), `walls.py` what the process may not do, `comm.py` a rank's view
of the others, `main.py` the loop that is asked and answers. Nothing here decides what is right.
"""
