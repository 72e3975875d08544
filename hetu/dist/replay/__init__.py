"""Time travel: a job is recorded (`record.py`), a rank of it runs again alone (`again.py`), two are compared."""
